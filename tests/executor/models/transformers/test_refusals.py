"""Classes that are refused for what they keep or compute beside pages, and checks that refuse no other class."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.transformers import TransformersModel
from quire.executor.models.transformers.cache_check import check_cached_attention
from quire.executor.models.transformers.row_by_row import RowByRow
from quire.executor.models.transformers.skeleton import build_skeleton
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.tiny_models import write_checkpoint
from tests.executor.paged_driver import Checkpoints, load_model, model_context, read_spec, transformers_spec

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_depend_on_the_steps_are_refused(dtype: Literal["float32", "bfloat16"], tmp_path: Path) -> None:
    """RecurrentGemma keeps its states in modules, where requests overwrite one another's."""
    write_checkpoint(tmp_path, "recurrent_gemma")
    options = ModelConfig(model=str(tmp_path), model_impl="transformers", dtype=dtype)
    with pytest.raises(ModelLoadError, match=r"RecurrentGemmaForCausalLM .* other logits .*--model-impl quire"):
        load_model(read_model_spec(tmp_path, options))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("cpmant", r"row by row \(it puts tokens of its own before a sequence: 32\)"),
        ("qwen4_exp_text", r"keeps more .* and states \(indexer_position_ids\)\. .*--model-impl quire"),
        ("xlstm", r"keeps more .* and states \(rnn_state\)"),
        ("xlnet", r"keeps nothing of a sequence in the library's cache.* quire\.register_model"),
    ],
)
def test_what_a_class_does_beside_pages_is_refused(model_type: str, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type)
    options = ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="float32")
    spec = read_model_spec(tmp_path, options)
    with pytest.raises(ModelLoadError, match=message):
        load_model(spec)


def test_passes_that_share_a_cache_are_refused(checkpoint: Checkpoints) -> None:
    """Here each call of attention has pages of its own; there the pass that stores last has the cache."""
    model = build_skeleton(read_spec(checkpoint("llama")), torch.float32, 64)
    check_cached_attention(model, model.model)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ModelLoadError, match="other keys and values of a token in a later step"):
        check_cached_attention(model, model.model)


@pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="this Transformers has no class with loops")
def test_a_loop_that_keeps_its_last_pass_alone_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "dory", recurrent_kv_cache_mode="last_loop")
    with pytest.raises(ModelLoadError, match=r"DoryForCausalLM .* other keys and values of a token in a later step"):
        load_model(read_model_spec(tmp_path, ModelConfig(model=str(tmp_path), dtype="float32")))


def test_single_tokens_that_another_formula_computes_are_refused(tmp_path: Path) -> None:
    """Nemotron-H bounds its time steps from below, but not for a token that comes alone."""
    write_checkpoint(tmp_path, "nemotron_h")
    options = ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="float32")
    with pytest.raises(ModelLoadError, match=r"other logits .*--model-impl quire"):
        load_model(read_model_spec(tmp_path, options))


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "mamba", "qwen3_next"])
def test_rounding_does_not_refuse_a_class(model_type: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model_type)
    options = ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="bfloat16")
    model = load_model(read_model_spec(tmp_path, options))
    assert isinstance(model, TransformersModel)
    assert type(model._sequences) is RowByRow
    if model.fast_path is not None:
        assert model.fast_path.programs is not None
        assert model.fast_path.programs[0].selects


def test_a_dry_build_checks_no_logits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "recurrent_gemma")
    options = ModelConfig(model=str(tmp_path), model_impl="transformers", dtype="float32")
    spec = read_model_spec(tmp_path, options)
    assert held_bytes(dry_build(spec, model_context(spec))) > 0


def test_models_that_cannot_share_a_step_are_refused_by_name(checkpoint: Checkpoints) -> None:
    spec = transformers_spec(checkpoint("llama"), architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelLoadError, match=r"LlamaForSequenceClassification of .* generates no text"):
        load_model(spec)
    with pytest.raises(ModelLoadError, match="knows neither it nor model_type 'foo'"):
        load_model(transformers_spec(checkpoint("llama"), model_type="foo", architectures=["FooForCausalLM"]))

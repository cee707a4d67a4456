"""Embeddings and heads that config.json calls tied: what the files hold decides, as in Transformers."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import ops
from quire.core.config.model import ModelConfig
from quire.core.errors import ModelLoadError
from quire.executor.inspection.pack_writer import pack_model
from quire.executor.inspection.shard_writer import save_shards
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops.cpu.native import NativeBackend
from tests.executor.inspection.starts import config_of, outputs
from tests.executor.models.test_models import expected_logprobs
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model, model_context

torch.set_num_threads(1)

TOKENS = list(range(3, 60))
ENDS = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma3": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
}


def write(source: Path, folder: Path, *, tie: bool, without: str = "", **tensors: Tensor) -> Path:
    """The checkpoint in `source` with other `tensors`, and without one."""
    folder.mkdir()
    stored = load_file(source / "model.safetensors") | tensors
    stored = {name: tensor.clone() for name, tensor in stored.items() if name != without}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tie}))
    return folder


def spec_of(folder: Path, implementation: str = "auto") -> Any:
    return read_model_spec(folder, ModelConfig(model=str(folder), model_impl=implementation))  # type: ignore[arg-type]


def logprobs(folder: Path, implementation: str) -> Tensor:
    model = load_model(spec_of(folder, implementation))
    return PagedDriver(model, 1, 64).step({0: TOKENS})[0].log_softmax(dim=-1)


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
@pytest.mark.parametrize("stored", ["both", "head", "embedding"])
@pytest.mark.parametrize("family", ENDS)
def test_the_files_decide_what_is_tied(
    family: Any, stored: str, implementation: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    embedding, head = ENDS[family]
    without = {"both": "", "head": embedding, "embedding": head}[stored]
    folder = write(checkpoint(family), tmp_path / "tied", tie=True, without=without)
    expected = expected_logprobs(folder, TOKENS)
    torch.testing.assert_close(logprobs(folder, implementation), expected, atol=1e-4, rtol=0)


def test_two_that_are_the_same_are_held_once(checkpoint: Checkpoints, tmp_path: Path) -> None:
    embedding, head = ENDS["llama"]
    source = checkpoint("llama")
    same = load_file(source / "model.safetensors")[embedding]
    folders = [
        write(source, tmp_path / "same", tie=True, **{head: same}),
        write(source, tmp_path / "one", tie=True, without=head),
        write(source, tmp_path / "two", tie=True),
    ]
    held = []
    for folder in folders:
        spec = spec_of(folder)
        held.append(held_bytes(load_model(spec)))
        with contextlib.closing((context := model_context(spec)).weights):
            assert held_bytes(dry_build(spec, context)) == held[-1]
    assert held[0] == held[1]
    if isinstance(ops.bind("cpu"), NativeBackend):  # plain torch's packed head gives no rows for the embedding
        assert held[1] < held[2]


def test_pickled_weights_hold_both_ends_once(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """As torch saves a tied model."""
    source = checkpoint("llama", tie=True)
    shutil.copy(source / "config.json", tmp_path)
    stored = load_file(source / "model.safetensors")
    embedding, head = ENDS["llama"]
    torch.save({**stored, head: stored[embedding]}, tmp_path / "pytorch_model.bin")
    assert held_bytes(load_model(spec_of(tmp_path))) == held_bytes(load_model(spec_of(source)))


def test_a_stage_reads_the_end_that_is_stored(checkpoint: Checkpoints, tmp_path: Path) -> None:
    embedding, _ = ENDS["llama"]
    folder = write(checkpoint("llama"), tmp_path / "head", tie=True, without=embedding)
    for layers in (range(1), range(1, 2)):
        load_model(spec_of(folder), layers=layers)


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("save", [pack_model, save_shards])
def test_saved_models_know_what_was_tied(save: Any, is_same: bool, checkpoint: Checkpoints, tmp_path: Path) -> None:
    embedding, head = ENDS["llama"]
    source = checkpoint("llama")
    tensors = {head: load_file(source / "model.safetensors")[embedding]} if is_same else {}
    folder = write(source, tmp_path / "source", tie=True, **tensors)
    save(config_of(folder), tmp_path / "saved")
    assert outputs(tmp_path / "saved") == outputs(folder)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("family", ENDS)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_end_of_two_that_are_not_tied(
    family: Any, missing: int, implementation: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Transformers would draw it at random."""
    name = ENDS[family][missing]
    folder = write(checkpoint(family), tmp_path / "part", tie=False, without=name)
    with pytest.raises(ModelLoadError, match=rf"no tensor '{name}'.*do not share a weight.*tie_word_embeddings"):
        load_model(spec_of(folder, implementation))

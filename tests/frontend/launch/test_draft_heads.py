"""Layers that draft for a model: their config.json in all forms, and a draft that names its target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.config.model import ModelConfig
from quire.core.config.resolved import DraftModelConfig, EngineConfig
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.launch.options import resolve
from quire.frontend.launch.setup import EngineSetup
from quire.frontend.launch.speculation import read_draft
from tests.executor.step.drafting.test_eagle import write_eagle3

SIZES = {"hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 1, "num_attention_heads": 4, "model_type": "llama"}


def resolved(folder: Path, **options: Any) -> EngineConfig:
    args = read_keywords({"model": str(folder), "device": "cpu", "speculative_config": options})
    spec = read_model_spec(folder, ModelConfig(model=str(folder)))
    return resolve(args, spec, "server", draft=read_draft(args, spec))


def draft_of(config: EngineConfig) -> DraftModelConfig:
    assert config.draft_model is not None
    return config.draft_model


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", num_hidden_layers=6)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def speculators(kind: str, target: str, **config: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": SIZES,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
        **config,
    }


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_a_module_of_the_targets_own(folder: Path, method: str) -> None:
    """vLLM's older names are of families. One draft is the default, as vLLM's."""
    config = resolved(folder, method=method)
    draft = draft_of(config)
    assert (draft.spec.drafts_by, draft.spec.path, draft.num_tokens) == ("mtp", str(folder), 1)
    assert config.limits.num_lookahead_tokens == 1
    assert draft_of(resolved(folder, method=method, num_speculative_tokens=4)).num_tokens == 4


@pytest.mark.parametrize(
    ("method", "config", "layers", "num_drafts"),
    [
        ("eagle", {**SIZES, "architectures": ["LlamaForCausalLM"]}, [], 3),
        ("eagle3", {**SIZES, "draft_vocab_size": 96}, [1, 2, 2], 3),
        ("eagle3", {**SIZES, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, [0, 2, 5], 3),
        ("eagle3", {"model_type": "eagle", "model": SIZES, "eagle_aux_hidden_state_layer_ids": [2, 4]}, [1, 3], 3),
        ("eagle3", speculators("eagle3", "someone/model", eagle_aux_hidden_state_layer_ids=[2, 3, 5]), [1, 2, 4], 5),
        ("dflash", {**SIZES, "block_size": 8, "dflash_config": {"target_layer_ids": [0, 5]}}, [0, 5], 7),
        ("dflash", speculators("dflash", "someone/model", aux_hidden_state_layer_ids=[1, 6]), [0, 5], 5),
        ("medusa", {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"}, [], 4),
        ("mlp_speculator", {"emb_dim": 64, "inner_dim": 32, "n_predict": 2, "vocab_size": 320}, [], 2),
    ],
)
def test_the_forms_of_config_json(
    method: str, config: dict[str, Any], layers: list[int], num_drafts: int, folder: Path, tmp_path: Path
) -> None:
    heads = write_config(tmp_path / "heads", config)
    draft = draft_of(resolved(folder, method=method, model=str(heads)))
    assert (draft.spec.drafts_by, draft.spec.path, draft.num_tokens) == (method, str(heads), num_drafts)
    assert list(draft.spec.hf_config["target_layers"]) == layers
    assert (draft.spec.hidden_size, draft.spec.dtype) == (64, "float32")


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("medusa", {"hidden_size": 4096}, "hidden_size is 4096, and that of .* is 64: take the heads"),
        ("mlp_speculator", {"emb_dim": 128}, "emb_dim is 128, and that of .* is 64: take the heads"),
        ("eagle", {**SIZES, "hidden_size": 32}, "hidden_size is 32, and that of .* is 64: take the layers"),
        ("eagle3", {**SIZES, "vocab_size": 100}, "vocab_size is 100, fewer than the 320 of"),
        ("dflash", SIZES, "target_layer_ids of dflash_config must be layers of"),
        ("eagle3", {"speculators_model_type": "eagle3"}, "transformer_layer_config must be an object"),
    ],
)
def test_layers_of_another_model_are_refused(
    method: str, config: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    heads = write_config(tmp_path / "heads", config)
    with pytest.raises(ConfigError, match=message):
        resolved(folder, method=method, model=str(heads))


def setup_of(model: Path, **options: Any) -> EngineSetup:
    return EngineSetup.from_args(read_keywords({"model": str(model), "device": "cpu", **options}), "server")


def test_a_draft_that_names_its_target_serves_it(folder: Path, tmp_path: Path) -> None:
    heads = write_config(tmp_path / "heads", speculators("eagle3", str(folder)))
    setup = setup_of(heads)
    assert (setup.folder, setup.config.spec.path, setup.config.spec.num_layers) == (folder, str(folder), 6)
    assert (draft_of(setup.config).spec.path, draft_of(setup.config).num_tokens) == (str(heads), 5)
    assert setup.args.model.served_model_name == [str(heads)]
    fewer = setup_of(heads, spec_tokens=2, served_model_name=["mine"])
    assert (draft_of(fewer.config).num_tokens, fewer.args.model.served_model_name) == (2, ["mine"])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (speculators("dspark", "a/b"), {}, "drafts of the kind 'dspark' are not served; only mtp, eagle"),
        (speculators("eagle3", ""), {}, "names no target .*serve the target, and name this folder"),
        (speculators("eagle3", "a/b"), {"spec_method": "ngram"}, "is itself a draft, for a/b: serve that with"),
    ],
)
def test_drafts_that_cannot_be_followed(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        setup_of(write_config(tmp_path / "heads", config), **options)


def test_a_draft_serves_its_target_and_changes_no_token(folder: Path, tmp_path: Path) -> None:
    heads, _ = write_eagle3(tmp_path / "heads", "speculators", [1, 3, 4])
    config = json.loads((heads / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder)
    (heads / "config.json").write_text(json.dumps(config))
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 20)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64}
    with LLM(str(folder), **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(str(heads), **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected

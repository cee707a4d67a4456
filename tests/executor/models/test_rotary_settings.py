"""config.json's ways to say how a model rotates and which layers have windows, against Transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.config.model import ModelConfig
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.models.test_models import expected_logprobs
from tests.executor.paged_driver import Checkpoints, PagedDriver, load_model

torch.set_num_threads(1)

TOKENS = list(range(3, 100))
BASE = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA_BY_KIND = {
    "full_attention": {"rope_theta": 777.0, **LINEAR},
    "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope": BASE, "max_position_embeddings": 128},
    "gemma3": {"sliding_window": 8, "num_hidden_layers": 6},
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 4},
    "mistral": {"sliding_window": 8, "num_hidden_layers": 4},
    "glm": {},
    "deepseek_v3": {},
}


def changed(source: Path, folder: Path, fields: dict[str, Any]) -> Path:
    """The checkpoint in `source` with other fields of config.json; ... leaves one out."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = {**json.loads((source / "config.json").read_bytes()), **fields}
    (folder / "config.json").write_text(json.dumps({name: each for name, each in config.items() if each is not ...}))
    return folder


def logprobs(folder: Path, **options: Any) -> Tensor:
    model = load_model(read_model_spec(folder, ModelConfig(model=str(folder), **options)))
    return PagedDriver(model, 1, 128, block_size=4).step({0: TOKENS})[0].log_softmax(dim=-1)


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "both-forms": ("llama", {"rope_scaling": LINEAR}),
    "both-forms-and-base": ("llama", {"rope_scaling": YARN, "rope_theta": 777.0}),
    "both-forms-by-kind": ("gemma3", {"rope_scaling": LINEAR}),
    "both-forms-by-kind-of-one-base": ("olmo3", {"rope_scaling": LINEAR}),
    "no-part": ("llama", {"partial_rotary_factor": None}),
    "no-part-in-block": ("llama", {"rope_parameters": {**BASE, "partial_rotary_factor": None}}),
    "no-part-of-a-half": ("glm", {"partial_rotary_factor": None, "rope_parameters": ...}),
    "no-flags": ("deepseek_v3", {"rope_interleave": None, "norm_topk_prob": None}),
    "layer-types": ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "no-layer-types": ("mistral", {"layer_types": None}),
}


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
@pytest.mark.parametrize("name", FIELDS)
def test_fields_mean_what_they_mean_to_transformers(
    name: str, implementation: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    family, fields = FIELDS[name]
    folder = changed(checkpoint(family, **MODELS[family]), tmp_path / "changed", fields)  # type: ignore[arg-type]
    got = logprobs(folder, model_impl=implementation)
    torch.testing.assert_close(got, expected_logprobs(folder, TOKENS), atol=1e-4, rtol=0)


OVERRIDES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "base": ("llama", {"rope_theta": 777.0}, {"rope_parameters": {**BASE, "rope_theta": 777.0}}),
    "scaling": ("llama", {"rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 500.0, **YARN}}),
    "by-kind": (
        "gemma3",
        {"rope_scaling": LINEAR, "rope_theta": 777.0, "rope_local_base_freq": 55.0},
        {"rope_parameters": GEMMA_BY_KIND},
    ),
}


@pytest.mark.parametrize("implementation", ["quire", "transformers"])
@pytest.mark.parametrize("name", OVERRIDES)
def test_older_names_override_what_transformers_5_wrote(
    name: str, implementation: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    family, overrides, fields = OVERRIDES[name]
    source = checkpoint(family, **MODELS[family])  # type: ignore[arg-type]
    expected = expected_logprobs(changed(source, tmp_path / "changed", fields), TOKENS)
    got = logprobs(source, model_impl=implementation, hf_overrides=overrides)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)

"""What is said of architectures that have no file."""

from typing import Any

import pytest
from msgspec.structs import replace

from quire.core.config.resolved import ModelSpec
from quire.executor.models.unsupported import explain_unsupported

SPEC = ModelSpec(
    path="", name="mine", architecture="", dtype="float32", vocab_size=1, num_layers=1, num_attention_heads=1,
    num_kv_heads=1, head_dim=1, hidden_size=1, max_position_embeddings=1, eos_token_ids=[], hf_config={},
    config_json={},
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "config", "parts"),
    [
        ("BloomForCausalLM", {"model_type": "bloom"}, ["Transformers 5", "has it", "Supported: LlamaForCausalLM."]),
        ("T5ForConditionalGeneration", {"model_type": "t5"}, ["has it, but not as a decoder that generates text"]),
        ("LlamaForCausalLm", {"model_type": "none"}, ["Nearest names: LlamaForCausalLM"]),
        ("MyOwnModel", {"model_type": "bloom"}, ['--hf-overrides \'{"architectures": ["BloomForCausalLM"]}\'']),
        ("MyOwnModel", {"model_type": "clip"}, ["knows model_type 'clip', but no decoder of it"]),
        ("MyOwnModel", {"model_type": "of-next-year"}, ["knows neither", "'of-next-year'; a newer release may"]),
        ("MyOwnModel", {"auto_map": {"AutoModel": "own.MyOwnModel"}}, ["brings code for it, which is not run"]),
    ],
)
def test_an_unknown_architecture(architecture: str, config: dict[str, Any], parts: list[str]) -> None:
    text = explain_unsupported(replace(SPEC, architecture=architecture, hf_config=config), ["LlamaForCausalLM"])
    assert text.startswith(f"Architecture {architecture!r} of mine is not supported.")
    for part in parts:
        assert part in text

"""Decoders that serve as encoders: config.json says that their tokens see later ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from quire.core.errors import ModelLoadError
from quire.executor.models.registry import is_native
from tests.executor.models.test_encoders import PROMPTS, encode
from tests.executor.models.tiny_encoders import VOCAB_SIZE
from tests.executor.paged_driver import load_model, read_spec
from tests.executor.thread_group import on_every_rank

torch.set_num_threads(1)

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 72, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "Llama": {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"},
    "Mistral": {"is_causal": False, "sliding_window": None},
    "Qwen2": {"is_causal": False, "architectures": ["Qwen2ForCausalLM"]},  # as GTE-Qwen2 says
    "Qwen3": {"is_causal": False},
    "Gemma3Text": {"sliding_window": 16},  # the library halves it, also what it wrote itself
}
"""By the stem of a class: what config.json says besides."""
_OWN: dict[str, dict[str, Any]] = {
    "Gemma3Text": {"sliding_window": 16, "use_bidirectional_attention": True, "sliding_window_pattern": 2},
    "Mistral": {"sliding_window": None},
}


def write(folder: Path, stem: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(**SIZES, **_OWN.get(stem, {}))
    model = getattr(transformers, f"{stem}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"architectures": [f"{stem}Model"]} | FIELDS[stem]))
    return model.eval()


@torch.inference_mode()
def states_of(model: PreTrainedModel, stem: str, prompt: list[int]) -> Tensor:
    """The library's hidden states, with a mask that hides nothing where its class would hide later tokens."""
    mask = None if stem == "Gemma3Text" else torch.zeros(1, 1, len(prompt), len(prompt))
    return model(input_ids=torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0]


@pytest.mark.parametrize("stem", FIELDS)
def test_tokens_see_later_ones(stem: str, tmp_path: Path) -> None:
    reference, spec = write(tmp_path, stem), read_spec(tmp_path)
    assert spec.is_encoder
    model: Any = load_model(spec)
    assert is_native(model)
    assert list(model.kv_layers) == []
    ops = model.embed._rows.ops
    for states, prompt in zip(encode(model, PROMPTS, ops), PROMPTS, strict=True):
        torch.testing.assert_close(states, states_of(reference, stem, prompt), atol=1e-4, rtol=0)


def test_ranks_compute_the_same(tmp_path: Path) -> None:
    reference = write(tmp_path, "Qwen3")

    def run(group: Any) -> list[Tensor]:
        model: Any = load_model(read_spec(tmp_path), group=group)
        return encode(model, PROMPTS, model.embed._rows.ops)

    for got in on_every_rank(2, run):
        for states, prompt in zip(got, PROMPTS, strict=True):
            torch.testing.assert_close(states, states_of(reference, "Qwen3", prompt), atol=1e-4, rtol=0)


def test_a_file_without_support_refuses(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**SIZES)
    transformers.Gemma2Model(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = {"architectures": ["Gemma2Model"], "is_causal": False}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))
    with pytest.raises(ModelLoadError, match="tokens see later ones"):
        load_model(read_spec(tmp_path))

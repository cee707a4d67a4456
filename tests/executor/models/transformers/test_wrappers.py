"""Models that read images, through the library's class: their text models alone, built as config.json says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quire.core.config.model import ModelConfig
from quire.executor.memory.dry_build import dry_build, held_bytes
from quire.executor.models.transformers import TransformersModel
from quire.frontend.checkpoint.model_spec import read_model_spec
from tests.executor.paged_driver import PagedDriver, load_model, model_context

torch.set_num_threads(1)

TOKENS = list(range(3, 40))
TEXT = {
    "vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "sliding_window": 16, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 28,
    "patch_size": 14, "projection_dim": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
}  # fmt: skip
WRAPPERS = {
    "gemma3": None, "qwen3_vl": None, "mistral3": "mistral", "llava": "llama", "internvl": "qwen2",
    "paligemma": "gemma2", "smolvlm": "llama", "idefics3": "llama",
}  # fmt: skip
"""Model type → that of the text model, where several would do."""


def write(folder: Path, model_type: str) -> Path:
    """A tiny checkpoint, as the library writes it."""
    text = TEXT if WRAPPERS[model_type] is None else {**TEXT, "model_type": WRAPPERS[model_type]}
    config = CONFIG_MAPPING[model_type](text_config=dict(text), vision_config=dict(VISION))
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if parameter.dim() == 1 else 1.4 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale if parameter.dim() > 1 else parameter + noise * scale)
    model.save_pretrained(folder)
    return folder


def expected(folder: Path) -> Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(dim=-1)


def logprobs(folder: Path) -> Tensor:
    model = load_model(read_model_spec(folder, ModelConfig(model=str(folder))))
    assert isinstance(model, TransformersModel)
    return PagedDriver(model, 1, 64).step({0: TOKENS})[0].log_softmax(dim=-1)


@pytest.mark.turns(4)
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_text_is_read_as_by_transformers(model_type: str, tmp_path: Path) -> None:
    folder = write(tmp_path, model_type)
    torch.testing.assert_close(logprobs(folder), expected(folder), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("inner", "outer"), [(True, False), (False, True)])
def test_a_wrappers_head_is_that_of_its_files(inner: bool, outer: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, "gemma3")
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_bytes())
    config["text_config"]["tie_word_embeddings"] = inner
    path.write_text(json.dumps({**config, "tie_word_embeddings": outer}))
    stored = load_file(folder / "model.safetensors")
    [(name, embedding)] = [item for item in stored.items() if "embed_tokens" in item[0]]
    head = {"language_model.lm_head.weight": embedding.flip(0).contiguous()}
    save_file(stored | head, folder / "model.safetensors", metadata={"format": "pt"})
    assert name.startswith("language_model.")
    torch.testing.assert_close(logprobs(folder), expected(folder), atol=1e-4, rtol=0)


def test_what_images_need_is_neither_held_nor_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path, "gemma3")
    spec = read_model_spec(folder, ModelConfig(model=str(folder)))
    whole, before = held_bytes(load_model(spec)), logprobs(folder)
    assert held_bytes(dry_build(spec, model_context(spec))) == whole
    stored = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in stored.items() if name.startswith("language_model.")}
    assert whole < 1.5 * sum(tensor.nbytes for tensor in text.values()) < sum(each.nbytes for each in stored.values())
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logprobs(folder), before)

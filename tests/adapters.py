"""Adapters of tiny checkpoints, written as PEFT writes them, and the tokens that they should give."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def save_adapter(folder: Path, tensors: dict[str, Tensor], *, prefix: str = "base_model.model.", **config: Any) -> Path:
    """Writes an adapter's files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder


def random_tensors(
    model: PreTrainedModel, seed: int, targets: tuple[str, ...] = ALL, rank: int = 4
) -> dict[str, Tensor]:
    """A and B of some layers of a model, which change its tokens."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(targets):
            outputs, inputs = module.weight.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 3
    return tensors


def load(model_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def merged(model_folder: Path, tensors: dict[str, Tensor], scale: float = 2.0) -> PreTrainedModel:
    """The model with the adapter's products in its weights."""
    model = load(model_folder)
    with torch.no_grad():
        for key, a in tensors.items():
            name, _, kind = key.partition(".lora_")
            if kind == "A.weight":
                model.get_submodule(name).weight += scale * tensors[f"{name}.lora_B.weight"] @ a
    return model


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()

"""Tensors that models have and files do not: parts of fused ones, biases that are zero, numbers of the metadata."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quire.frontend.checkpoint.gguf.fields import Fields
from quire.frontend.checkpoint.gguf.header import TensorInfo

_WHOLE = (
    "bloom", "falcon", "gpt2", "gptneox", "phi3", "qwen3next", "qwen35", "qwen35moe", "starcoder",
    "gemma4", "kimi-linear",
)  # fmt: skip
"""Architectures whose models have queries, keys and values in one tensor, too, or of sizes that differ by layer.

llama.cpp reads files of all others with one tensor or with three.
"""
_NAMES = ("attn_q", "attn_k", "attn_v")
_BIASED = ((*_NAMES, "attn_output"), ("ffn_gate", "ffn_up", "ffn_down"))
"""Layers of which models have a bias each or none at all."""


def apart(fields: Fields, tensors: Mapping[str, tuple[int, TensorInfo]]) -> dict[str, tuple[int, TensorInfo]]:
    """`tensors` (file, where in it) by their names, with the rows of fused ones under the names of their parts."""
    if fields.architecture in _WHOLE:
        return dict(tensors)
    found: dict[str, tuple[int, TensorInfo]] = {}
    for name, (file, info) in tensors.items():
        if ".attn_qkv." in name:
            found |= {part.join(name.split("attn_qkv")): (file, rows) for part, rows in _parts(fields, name, info)}
        else:
            found[name] = (file, info)
    return found


def _parts(fields: Fields, name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    import gguf  # imported here: 0.2 s, for these files only

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[info.type]]
    row_bytes = math.prod(info.shape[1:]) * size // block
    heads = fields.by_layer("attention.head_count_kv")[int(name.split(".")[1])] or fields.num_heads
    keys, values = heads * fields.head_dim, heads * fields.get("attention.value_length", fields.head_dim)
    offset = info.offset
    for part, rows in zip(_NAMES, (info.shape[0] - keys - values, keys, values), strict=True):
        yield part, TensorInfo(info.type, (rows, *info.shape[1:]), offset)
        offset += rows * row_bytes


def absent_biases(fields: Fields) -> dict[str, int]:
    """The lengths of zero biases, by name: the file has biases of that kind, but leaves these out."""
    return {
        f"blk.{layer}.{name}.bias": fields.tensors[f"blk.{layer}.{name}.weight"].shape[-2]
        for names in _BIASED
        if any(fields.has_any(f"{name}.bias") for name in names)
        for layer in range(fields.need("block_count"))
        for name in names
        if fields.has(layer, f"{name}.weight") and not fields.has(layer, f"{name}.bias")
    }


def tensors_of_metadata(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Tensors of one number: those of each layer's xIELU (arXiv:2411.13010), if the model has that."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {
        f"blk.{layer}.xielu_{name}": value
        for name in names
        for layer, value in enumerate(metadata.get(f"xielu.{name}", []))
    }

"""Tensors that models have and files do not: parts of fused ones, and numbers of the metadata."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quire.frontend.checkpoint.gguf.fields import Fields
from quire.frontend.checkpoint.gguf.header import TensorInfo

_FUSED = ("bailingmoe2", "chatglm", "mimo2", "phi2")
"""Architectures of which files have one tensor; of some, others have three."""
_NAMES = ("attn_q", "attn_k", "attn_v")


def apart(fields: Fields, tensors: Mapping[str, tuple[int, TensorInfo]]) -> dict[str, tuple[int, TensorInfo]]:
    """`tensors` (file, where in it) by their names, with the rows of fused ones under the names of their parts."""
    if fields.architecture not in _FUSED:
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


def tensors_of_metadata(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Tensors of one number: those of each layer's xIELU (arXiv:2411.13010), if the model has that."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {
        f"blk.{layer}.xielu_{name}": value
        for name in names
        for layer, value in enumerate(metadata.get(f"xielu.{name}", []))
    }

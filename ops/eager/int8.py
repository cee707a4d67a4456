"""Linear layers with weights of one byte each, in plain torch: widened at each call, a part at a time."""

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from quire.ops.backend import Int8Weight, PackedLinear
from quire.ops.eager.linear import LinearLayers

_PART = 1 << 24
"""Numbers of a weight that are widened at once."""


@dataclass(frozen=True)
class Int8Layer:
    """A weight as it came, and the layer's bias [out]."""

    weight: Int8Weight
    bias: Tensor | None


class WidenedLinear(Generic[PackedLinear]):
    """The product with weights that are widened to `x`'s dtype. It saves memory and costs time."""

    def __init__(self, linear_layers: LinearLayers[PackedLinear]) -> None:
        self._linear_layers = linear_layers

    def multiply(self, x: Tensor, layer: Int8Layer) -> Tensor:
        """`x` [num_tokens, in] → [num_tokens, out]; a row's result does not depend on how many rows there are."""
        values, scales = layer.weight
        size = max(1, _PART // values.shape[1])
        biases = [None] * -(-len(values) // size) if layer.bias is None else layer.bias.split(size)
        parts = []
        for part, scale, bias in zip(values.split(size), scales.split(size), biases, strict=True):
            widened = (part * scale.unsqueeze(1)).to(x.dtype)
            parts.append(self._linear_layers.multiply(x, self._linear_layers.pack(widened, bias)))
        return torch.cat(parts, dim=1)

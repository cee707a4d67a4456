"""Linear layers with quantized weights, in plain torch: dequantized at each call, a part at a time."""

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from quire.ops.eager.linear import LinearLayers
from quire.ops.linear import PackedLinear
from quire.ops.quantized import QuantizedWeight, dequantize

PART = 1 << 24
"""The elements of a weight that are dequantized at once."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized weight, unchanged, and the layer's bias [out]."""

    weight: QuantizedWeight
    bias: Tensor | None


class DequantizedLinear(Generic[PackedLinear]):
    """Multiplies by weights that are dequantized to `x`'s dtype. It saves memory and costs time."""

    def __init__(self, linear_layers: LinearLayers[PackedLinear]) -> None:
        self._linear_layers = linear_layers

    def pack(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLayer:
        """Packs a checked `weight` [out, in] (and `bias` [out])."""
        return QuantizedLayer(weight, bias)

    def multiply(self, x: Tensor, layer: QuantizedLayer) -> Tensor:
        """Maps `x` [num_tokens, in] to [num_tokens, out]; a row's result does not depend on the number of rows."""
        out_features, in_features = layer.weight.shape
        size = max(1, PART // in_features)
        parts = []
        for first in range(0, out_features, size):
            rows = slice(first, first + size)
            bias = None if layer.bias is None else layer.bias[rows]
            dequantized = dequantize(layer.weight.rows(rows), x.dtype)
            parts.append(self._linear_layers.multiply(x, self._linear_layers.pack(dequantized, bias)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

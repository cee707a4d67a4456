"""Layers whose inputs are multiplied by factors first (AWQ, arXiv:2306.00978; SmoothQuant, arXiv:2211.10438)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.checkpoint_format import LayerFormat
from quire.executor.weights.quantization.log_once import log_expanded
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.linear import LinearWeight


@dataclass(frozen=True)
class ScaledInputs:
    """Another layer format, in which some layers have factors for their inputs, or a second weight of low rank.

    Such layers have no quantized form, in which neighbouring inputs share a scale: they are dequantized.

    Attributes:
        factors: the kind of the tensor: a factor for each input, or one for all.
        low_rank: kinds of two tensors [rank, in] and [out, rank], whose product is added to the weight.
    """

    layer_format: LayerFormat
    factors: str = "pre_quant_scale"
    low_rank: Sequence[tuple[str, str]] = ()

    def is_in(self, layer: StoredLayer) -> bool:
        return self.layer_format.is_in(layer)

    def read(self, layer: StoredLayer) -> LinearWeight:
        weight = self.layer_format.read(layer)
        low_rank = next((kinds for kinds in self.low_rank if layer.has(kinds[0])), None)
        if low_rank is None and not layer.has(self.factors):
            return weight
        plain = sharding.dequantized(weight, torch.float32)
        if low_rank is not None:
            log_expanded(layer.dtype, "beside a weight of low rank")
            plain += self._product(layer, *low_rank)
        if layer.has(self.factors):
            log_expanded(layer.dtype, "with a factor for each input")
            shape = layer.shape(self.factors, (layer.in_features,))
            if math.prod(shape) not in (1, layer.in_features):
                raise layer.mismatch(self.factors, "a factor for each input, or one for all")
            plain *= layer.read(self.factors, shape, torch.float32, dim=None).reshape(1, -1)
        return plain.to(layer.dtype)

    def _product(self, layer: StoredLayer, inner: str, outer: str) -> Tensor:
        rank, *_ = layer.shape(inner, ()) or (0,)
        first = layer.read(inner, (rank, layer.in_features), torch.float32, dim=None)
        return layer.read(outer, (layer.out_features, rank), torch.float32) @ first

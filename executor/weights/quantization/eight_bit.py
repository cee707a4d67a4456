"""8-bit weights: float8 and int8, with scales of any granularity."""

from dataclasses import dataclass

import torch

from quire.executor.weights.quantization.bit_packing import integers_around_zero
from quire.executor.weights.quantization.groups import MX_GROUP
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.quantized import QuantizedWeight

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Float8:
    """Codes `weight` [out, in] float8. Scales of activations are not read: activations are not quantized.

    Attributes:
        scale: the kind of the scales: of the tensor, of each output, of groups, or of blocks.
        block: outputs and inputs of a block, if there are any.
    """

    scale: str = "weight_scale"
    block: tuple[int, int] | None = None

    def is_in(self, layer: StoredLayer) -> bool:
        return any(layer.has("weight", dtype) for dtype in _FLOATS) and layer.has(self.scale)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        dtype = layer.stored_dtype("weight", torch.float8_e4m3fn)
        codes = layer.read("weight", (layer.out_features, layer.in_features), dtype)
        return QuantizedWeight(codes, layer.scales_or_exponents(self.scale, self.block, MX_GROUP))


@dataclass(frozen=True)
class Int8Codes:
    """Codes `weight` [out, in] int8, with `weight_scale` and perhaps `weight_zero_point`, of one shape.

    Attributes:
        has_byte_inputs: as in `QuantizedWeight`. Scales of activations are not read: kernels compute finer ones, of
            less than a token.
        group_size: inputs that share a scale; None: all.
        is_symmetric: no layer needs zero points.
    """

    has_byte_inputs: bool = False
    group_size: int | None = None
    is_symmetric: bool = True

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("weight", torch.int8) and layer.has("weight_scale")

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        return self._weight(layer)._replace(has_byte_inputs=self.has_byte_inputs)

    def _weight(self, layer: StoredLayer) -> QuantizedWeight:
        kind, block = "weight_zero_point", None if self.group_size is None else (1, self.group_size)
        codes = layer.read("weight", (layer.out_features, layer.in_features), torch.int8)
        scales = layer.scales("weight_scale", block)
        if not layer.has(kind) and (layer.is_known or self.is_symmetric):
            if not self.is_symmetric:
                raise layer.mismatch(kind, "zero points (symmetric: false)")
            return QuantizedWeight(codes, scales)
        if layer.stored_dtype(kind, torch.int8) not in _SIGNED:
            raise layer.mismatch(kind, "whole numbers with a sign")
        zeros = layer.per_group(kind, block, layer.stored_dtype(kind, torch.int8))
        if zeros.shape[1] not in (1, scales.shape[1]):
            raise layer.mismatch(kind, "as many zero points as weight_scale")
        if layer.are_zero(zeros):
            return QuantizedWeight(codes, scales)
        return integers_around_zero(codes, 8, scales, zeros.float().expand(scales.shape) + 128)

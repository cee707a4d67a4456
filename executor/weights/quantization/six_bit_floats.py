"""FP6 weights (MXFP6): a power of two for 32 values, which are kept in float8, where each is exact."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import powers_of_two, unpack
from quire.executor.weights.quantization.groups import MX_GROUP
from quire.executor.weights.quantization.stored_layer import EXPONENTS, StoredLayer
from quire.ops.quantized import QuantizedWeight

_BITS = 6


@dataclass(frozen=True)
class Mxfp6:
    """MXFP6 (OCP Microscaling Formats, version 1.0): codes uint8 [out, in * 6 / 8], and `weight_scale` of E8M0 [out, in
    / 32]. A row's codes follow one another from the lowest bit on.

    Attributes:
        mantissa: bits of a code's mantissa: 2 (E3M2) or 3 (E2M3).
        weight: the kind of the codes.
    """

    mantissa: int = 2
    weight: str = "weight"

    def is_in(self, layer: StoredLayer) -> bool:
        size = layer.in_features * _BITS // 8
        return layer.find(self.weight) == ((layer.out_features, size), torch.uint8) and layer.has("weight_scale")

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        if size % MX_GROUP:
            raise ModelLoadError(f"{layer.name}: {size} inputs are no multiple of {MX_GROUP}, the group of MXFP6.")
        codes = unpack(layer.read(self.weight, (out, size * _BITS // 8), torch.uint8), _BITS, size)
        dtype = layer.stored_dtype("weight_scale", torch.uint8)
        if dtype not in EXPONENTS:
            raise layer.mismatch("weight_scale", "bytes (MXFP6)")
        scales = powers_of_two(layer.read("weight_scale", (out, size // MX_GROUP), dtype))
        kind = torch.float8_e5m2 if self.mantissa == 2 else torch.float8_e4m3fn
        values = fp6_values(self.mantissa).to(kind).view(torch.uint8).to(codes.device)
        return QuantizedWeight((codes if codes.is_meta else values[codes.int()]).view(kind), scales)


def fp6_values(mantissa: int) -> Tensor:
    """Lists the values of all codes, [64] float32. There are no infinities."""
    codes = torch.arange(64)
    exponents, fraction = (codes & 31) >> mantissa, codes & ((1 << mantissa) - 1)
    bias = (1 << (4 - mantissa)) - 1
    whole = fraction + (exponents > 0) * (1 << mantissa)  # subnormal values lack the leading bit
    numbers = torch.ldexp(whole.float(), exponents.clamp(min=1) - bias - mantissa)
    return torch.where(codes >= 32, -numbers, numbers)

"""FP4 weights (E2M1): MXFP4 with one power of two for 32 values, NVFP4 with two scales for 16, or one scale in E5M3."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import FP4, powers_of_two, table, unsigned_e5m3
from quire.executor.weights.quantization.groups import MX_GROUP, NV_GROUP
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.quantized import QuantizedWeight

MX_INT4 = tuple(sign * quarters / 4 for sign in (1.0, -1.0) for quarters in range(8))
"""The values of AutoRound's MXINT4: a sign and quarters, in the place of MXFP4's floats."""


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 (OCP Microscaling Formats, version 1.0): two codes a byte, and E8M0 scales.

    Attributes:
        weight: the kind of the codes [out, in / 2], the lower half first.
        scale: the kind of the scales [out, in / 32].
        dtype: of the codes: uint8 or int8.
        values: of the sixteen codes.
    """

    weight: str = "weight_packed"
    scale: str = "weight_scale"
    dtype: torch.dtype = torch.uint8
    values: tuple[float, ...] = FP4

    def is_in(self, layer: StoredLayer) -> bool:
        kinds, size = (torch.uint8, torch.float8_e8m0fnu), layer.in_features // 2
        is_stored = layer.find(self.weight) == ((layer.out_features, size), self.dtype)
        return is_stored and any(layer.has(self.scale, kind) for kind in kinds)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        _check(layer, MX_GROUP)
        codes = layer.read(self.weight, (out, size // 2), self.dtype).view(torch.uint8)
        dtype = layer.stored_dtype(self.scale, torch.uint8)
        return mxfp4(codes, layer.read(self.scale, (out, size // MX_GROUP), dtype), self.values)


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4: codes as in MXFP4, `weight_scale` [out, groups] float8, and a float32 scale for the tensor.

    Attributes:
        weight: the kind of the codes.
        factor: the kind of the tensor's scale.
        divides: the scales are divided by the tensor's scale instead of multiplied.
        group: inputs of a group, where tensors do not determine it: 16, or 32 with FP8 activations (ModelOpt).
    """

    weight: str
    factor: str
    divides: bool
    group: int = NV_GROUP

    def is_in(self, layer: StoredLayer) -> bool:
        size = (layer.out_features, layer.in_features // 2)
        return layer.find(self.weight) == (size, torch.uint8) and layer.has(self.factor)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        shape = layer.shape("weight_scale", (out, size // self.group))
        if layer.has("weight_scale") and not layer.has("weight_scale", torch.float8_e4m3fn):
            raise layer.mismatch("weight_scale", "scales of float8_e4m3fn (NVFP4)")
        group = next((each for each in (NV_GROUP, MX_GROUP) if shape == (out, size // each)), self.group)
        _check(layer, group)
        codes = layer.read(self.weight, (out, size // 2), torch.uint8)
        scales = layer.read("weight_scale", (out, size // group), torch.float32)
        factor = layer.scalar(self.factor)
        scales = scales / factor if self.divides else scales * factor
        return QuantizedWeight(codes, scales, table(FP4, codes.device))


@dataclass(frozen=True)
class Nvfp4OfE5m3:
    """AutoRound's NVFP4: codes as in NVFP4, and `weight_scale` [out, in / 16] of unsigned E5M3, uint8."""

    def is_in(self, layer: StoredLayer) -> bool:
        num_groups = layer.in_features // NV_GROUP
        is_scaled_so = layer.find("weight_scale") == ((layer.out_features, num_groups), torch.uint8)
        return is_scaled_so and layer.has("weight_packed", torch.uint8)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        _check(layer, NV_GROUP)
        codes = layer.read("weight_packed", (out, size // 2), torch.uint8)
        scales = layer.read("weight_scale", (out, size // NV_GROUP), torch.uint8)
        return QuantizedWeight(codes, unsigned_e5m3(scales), table(FP4, codes.device))


def mxfp4(codes: Tensor, exponents: Tensor, values: tuple[float, ...] = FP4) -> QuantizedWeight:
    """Builds a weight of codes [out, in / 2] and E8M0 scales [out, in / 32], both uint8."""
    return QuantizedWeight(codes, powers_of_two(exponents), table(values, codes.device))


def _check(layer: StoredLayer, group: int) -> None:
    if layer.in_features % group:
        raise ModelLoadError(f"{layer.name}: {layer.in_features} inputs are no multiple of {group}, the group of FP4.")

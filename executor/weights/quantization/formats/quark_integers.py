"""Quark's integers, as `quark/torch/utils/pack.py` of AMD's Quark 0.13 packs them. int4 in groups is as in AWQ."""

from dataclasses import dataclass

import torch

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import (
    INT4,
    PER_WORD,
    integers,
    integers_around_zero,
    unpack,
)
from quire.executor.weights.quantization.groups import equal_groups, num_groups_of
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.quantized import QuantizedWeight

_SCALES, _ZEROS = "weight_scale", "weight_zero_point"


@dataclass(frozen=True)
class PackedRows:
    """int4 with a scale an output (or one for all).

    Codes are `weight` int32 [out, in / 8], zero points int32 [out / 8], scales `weight_scale` [out]. Weights that were
    rounded to FP8 before have that rounding's scale as `weight_scale`, and `weight_scale_2` [out].

    Attributes:
        places: the place in a word of each of eight inputs.
        is_signed: codes are from -8 to 7 instead of from 0 to 15.
        has_zeros: there have to be zero points.
        is_of_fp8: expected where the tensors are not known.
    """

    places: tuple[int, ...]
    is_signed: bool = True
    has_zeros: bool = False
    is_of_fp8: bool = False

    def is_in(self, layer: StoredLayer) -> bool:
        scales = layer.find("weight_scale_2") or layer.find("weight_scale")
        return layer.has("weight", torch.int32) and scales is not None and len(scales.shape) < 2

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        codes = self._unpacked(layer.read("weight", (out, -(-size // PER_WORD)), torch.int32))[:, :size]
        scales = layer.scales("weight_scale")
        if layer.has("weight_scale_2") or (not layer.is_known and self.is_of_fp8):
            scales = scales.float() * layer.scales("weight_scale_2").float()
        kind, zeros = "weight_zero_point", None
        if self.has_zeros or layer.has(kind):
            if layer.is_known and not layer.has(kind):
                raise layer.mismatch(kind, "zero points (symmetric: false)")
            words = layer.read(kind, (-(-out // PER_WORD),), torch.int32, dim=None)
            stored = self._unpacked(words.unsqueeze(0)).t()[layer.rows.start : layer.rows.stop]
            if not (self.is_signed and layer.are_zero(stored)):
                zeros = stored ^ 8 if self.is_signed else stored
        if size % 2:
            raise ModelLoadError(f"{layer.name}: {size} inputs are an odd number, which codes of four bits cannot be.")
        return integers((codes ^ 8 if self.is_signed else codes).contiguous(), 4, scales, zeros)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        codes = unpack(words, 4, words.shape[1] * PER_WORD)
        return codes.unflatten(1, (-1, PER_WORD))[..., list(self.places)].flatten(1)


@dataclass(frozen=True)
class Columns:
    """int8, uint8 and int2 in groups, one code an element: `weight` [in, out]. int2 takes 32 bits.

    With `weight_scale` [groups, out], and zero points of its shape and the codes' type.

    Attributes:
        dtype, group_size, has_zeros: expected where the tensors are not known.
    """

    dtype: torch.dtype = torch.int8
    group_size: int = 128
    has_zeros: bool = False

    def is_in(self, layer: StoredLayer) -> bool:
        found = layer.find("weight")
        of_bytes = found is not None and found.dtype in (torch.int8, torch.uint8, torch.int32)
        is_turned = found is not None and found.shape == (layer.in_features, layer.out_features)
        return of_bytes and is_turned and len(layer.shape(_SCALES, ())) == 2

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        dtype = layer.stored_dtype("weight", self.dtype)
        codes = layer.read("weight", (size, out), dtype, dim=1).t().contiguous()
        scales, group = _group_scales(layer, self.group_size)
        zeros = None
        if layer.has(_ZEROS) or (not layer.is_known and self.has_zeros):
            shape = layer.shape(_SCALES, (num_groups_of(size, self.group_size), out))
            stored = layer.read(_ZEROS, shape, layer.stored_dtype(_ZEROS, dtype), dim=1).t().float()
            is_middle = dtype != torch.uint8 and layer.are_zero(stored)
            zeros = None if is_middle else equal_groups(stored.contiguous(), size, group)
        if dtype == torch.uint8:
            return integers(codes, 8, scales, zeros if zeros is not None else torch.zeros_like(scales))
        if dtype == torch.int8 or size % 2:
            return integers_around_zero(codes.to(torch.int8), 8, scales, None if zeros is None else zeros + 128)
        middle = len(INT4) // 2
        return integers((codes + middle).to(torch.uint8), 4, scales, None if zeros is None else zeros + middle)


@dataclass(frozen=True)
class PackedInt3:
    """int3: `weight` uint8 [out, in * 3 / 8], each row a stream from the lowest bit on.

    With `weight_scale` [out] and zero points uint8 [out * 3 / 8]; in groups, [groups, out] and [out, groups * 3 / 8].

    Attributes:
        group_size, has_zeros: expected where the tensors are not known; None: a scale an output.
    """

    group_size: int | None = None
    has_zeros: bool = False
    _middle: int = 4

    def is_in(self, layer: StoredLayer) -> bool:
        found = layer.find("weight")
        size = layer.in_features // 8 * 3
        scales = layer.stored_dtype(_SCALES, torch.uint8)
        return found == ((layer.out_features, size), torch.uint8) and scales.itemsize > 1

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        if size % 8:
            raise ModelLoadError(f"{layer.name}: {size} inputs are no multiple of 8, which codes of three bits fill.")
        codes = unpack(layer.read("weight", (out, size // 8 * 3), torch.uint8), 3, size) ^ self._middle
        is_of_groups = len(layer.shape(_SCALES, (1,) if self.group_size is None else (1, 1))) > 1
        scales, group = _group_scales(layer, self.group_size or -1) if is_of_groups else (layer.scales(_SCALES), size)
        zeros = None
        if layer.has(_ZEROS) or (not layer.is_known and self.has_zeros):
            if is_of_groups:
                num_groups, *_ = layer.shape(_SCALES, (num_groups_of(size, self.group_size or -1), out))
                packed = layer.read(_ZEROS, (out, num_groups * 3 // 8), torch.uint8)
                zeros = equal_groups(unpack(packed, 3, num_groups), size, group)
            else:
                packed = layer.read(_ZEROS, (out * 3 // 8,), torch.uint8, dim=None)
                zeros = unpack(packed, 3, out)[layer.rows.start : layer.rows.stop].unsqueeze(1)
            zeros = None if layer.are_zero(zeros) else zeros ^ self._middle
        return integers(codes, 3, scales, zeros)


def _group_scales(layer: StoredLayer, group_size: int) -> tuple[torch.Tensor, int]:
    """Reads `weight_scale` [groups, out] as the scales of a `QuantizedWeight`, and the inputs of a group."""
    out, size = layer.out_features, layer.in_features
    num_groups, *_ = layer.shape(_SCALES, (num_groups_of(size, group_size), out))
    group = layer.group_size(_SCALES, num_groups, group_size)
    scales = layer.read(_SCALES, (num_groups, out), layer.scale_dtype(_SCALES), dim=1).t()
    return equal_groups(scales.contiguous(), size, group), group

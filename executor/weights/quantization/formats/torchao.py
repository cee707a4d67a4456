"""The layer formats of torchao, as Transformers writes them to safetensors: a tensor subclass becomes several tensors.

https://github.com/pytorch/ao; `weight` becomes `_weight_qdata`, `_weight_scale` and others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import (
    FP4,
    INT4,
    integers,
    integers_around_zero,
    powers_of_two,
    table,
)
from quire.executor.weights.quantization.checkpoint_format import LayerFormat
from quire.executor.weights.quantization.fields import block, integer, is_on
from quire.executor.weights.quantization.groups import MX_GROUP, NV_GROUP, equal_groups
from quire.executor.weights.quantization.scaled_inputs import ScaledInputs
from quire.executor.weights.quantization.stored_layer import EXPONENTS, StoredLayer
from quire.ops.quantized import QuantizedWeight

_CODES, _SCALES, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_FACTORS = "_weight_act_pre_scale"
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def layer_formats(config: Mapping[str, Any]) -> Sequence[LayerFormat]:
    """Lists the layer formats that the layers may have; first the one that the config describes."""
    found = list(_types(config.get("quant_type")))
    name, given = found[0] if found else ("", {})
    has_factor = any(
        each.startswith("NVFP4") and is_on(fields, "use_dynamic_per_tensor_scale") for each, fields in found
    )
    group = _group_size(given)
    sizes = next((each for _, fields in found if (each := _block(fields)) and each[0] > 1), _block(given))
    bits = {str(_inner(each, "weight_dtype")) for _, each in found}
    short = bool(bits) and bits <= {"int1", "int2", "int3", "int4"}
    is_symmetric = str(_inner(given, "mapping_type") or "SYMMETRIC").startswith("SYMMETRIC")
    # Int8DynamicActivationInt8WeightConfig, and that of intx; not Float8DynamicActivation...
    have_byte_inputs = bool(found) and all(each.startswith("Int8DynamicActivation") for each, _ in found)
    plain_inputs: list[LayerFormat] = [
        ByteCodes(torch.int8, sizes, is_symmetric=is_symmetric, is_short=short, has_byte_inputs=have_byte_inputs),
        ByteCodes(torch.float8_e4m3fn, sizes),
        NibbleCodes(group or 128), TiledCodes(group or 128), BlockScaled(needs_factor=has_factor), Unsupported(),
    ]  # fmt: skip
    every = [ScaledInputs(layer_format, _FACTORS) for layer_format in plain_inputs]
    if name.startswith("Int4"):
        first = every[3] if "tile" in str(given.get("int4_packing_format")) else every[2]
    elif name.startswith(("MX", "NVFP4")):
        is_nv = name.startswith("NV")
        is_short = is_nv or "float4" in str(given.get("weight_dtype"))
        dtype = torch.uint8 if is_short else torch.float8_e4m3fn
        first = ScaledInputs(BlockScaled(dtype, has_factor=is_nv, needs_factor=has_factor), _FACTORS)
    else:
        first = every[1] if name.startswith("Float8") else every[0]
    return [first, *(layer_format for layer_format in every if layer_format is not first)]


def _types(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (class, fields) of all configs for layers in torchao's JSON."""
    if not isinstance(config, dict):
        return
    name, fields = str(config.get("_type", "")), config.get("_data")
    if name.endswith("Config") and name not in ("FqnToConfig", "ModuleFqnToConfig") and isinstance(fields, dict):
        yield name, fields
        return
    for each in config.values():
        yield from _types(each)


def _group_size(given: Mapping[str, Any]) -> int | None:
    inner = _inner(given, "weight_granularity") or _inner(given, "granularity")
    found = integer(given, "group_size", 0) or (integer(inner, "group_size", 0) if isinstance(inner, Mapping) else 0)
    return found if found > 0 else None


def _inner(given: Mapping[str, Any], field: str) -> Any:
    """Returns the fields of a torchao object inside a field; None, if the field is no such object."""
    value = given.get(field)
    return value.get("_data") if isinstance(value, Mapping) else None


def _block(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the outputs and inputs that share a scale. Of two granularities, the last is for weights."""
    granularity = given.get("granularity")
    last = granularity[-1] if isinstance(granularity, list) and granularity else granularity
    inner = _inner({"granularity": last}, "granularity")
    if isinstance(inner, Mapping) and (size := block(inner, "block_size")) is not None:
        return size
    group = _group_size(given)
    return None if group is None else (1, group)


@dataclass(frozen=True)
class ByteCodes:
    """Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor: `_weight_qdata` [out, in], one byte an element.

    With `_weight_scale` of the tensor, an output, groups or blocks, and perhaps `_weight_zero_point` of its shape.

    Attributes:
        dtype: of the codes.
        block: outputs and inputs that share a scale; None: a scale an output.
        is_symmetric: zero points are zero, expected where the tensors are not known.
        is_short: codes have four bits.
        has_byte_inputs: as in `QuantizedWeight`.
    """

    dtype: torch.dtype
    block: tuple[int, int] | None = None
    is_symmetric: bool = True
    is_short: bool = False
    has_byte_inputs: bool = False

    def is_in(self, layer: StoredLayer) -> bool:
        kinds = _FLOATS if self.dtype in _FLOATS else (self.dtype,)
        found = layer.find(_CODES)
        return (
            found is not None
            and found.dtype in kinds
            and found.shape == (layer.out_features, layer.in_features)
            and layer.stored_dtype(_SCALES, torch.uint8).itemsize > 1
        )

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        return self._weight(layer)._replace(has_byte_inputs=self.has_byte_inputs)

    def _weight(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        dtype = layer.stored_dtype(_CODES, self.dtype)
        codes = layer.read(_CODES, (out, size), dtype)
        scales = layer.scales(_SCALES, self.block)
        zeros = None if dtype in _FLOATS else self._zeros(layer, scales)
        group = size // scales.shape[1]
        if dtype in _FLOATS or not (self.is_short and size % 2 == 0 and (group % 2 == 0 or scales.shape[1] == 1)):
            return integers_around_zero(codes, 8, scales, None if zeros is None else zeros + 128)
        return integers((codes + 8).view(torch.uint8), 4, scales, None if zeros is None else zeros + 8)

    def _zeros(self, layer: StoredLayer, scales: Tensor) -> Tensor | None:
        if not layer.has(_ZEROS) and (layer.is_known or self.is_symmetric):
            if not self.is_symmetric:
                raise layer.mismatch(_ZEROS, "zero points (mapping_type: ASYMMETRIC)")
            return None
        zeros = layer.per_group(_ZEROS, self.block, layer.stored_dtype(_ZEROS, torch.int8)).float()
        if zeros.shape[1] not in (1, scales.shape[1]):
            raise layer.mismatch(_ZEROS, f"as many zero points as {_SCALES}")
        is_middle = self.is_symmetric if zeros.is_meta else not zeros.any()
        return None if is_middle else zeros.expand(scales.shape)


@dataclass(frozen=True)
class NibbleCodes:
    """Int4Tensor: `_weight_qdata` int8 [out, in / 2], the even inputs in the lower halves, from -8 to 7.

    With `_weight_scale` and `_weight_zero_point` [groups, out]; a value is `code * scale + zero_point`.
    """

    group_size: int

    def is_in(self, layer: StoredLayer) -> bool:
        found = layer.find(_CODES)
        halves = (layer.out_features, layer.in_features // 2)
        return found is not None and (found.dtype, found.shape) == (torch.int8, halves)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        pairs = layer.read(_CODES, (out, size // 2), torch.int8).view(torch.uint8) ^ 0x88
        num_groups, *_ = layer.shape(_SCALES, (-(-size // self.group_size), out))
        group = layer.group_size(_SCALES, num_groups, self.group_size)
        scales, zeros = (
            equal_groups(layer.read(kind, (num_groups, out), layer.scale_dtype(kind), dim=1).t(), size, group)
            for kind in (_SCALES, _ZEROS)
        )
        return _with_offsets(pairs, scales, zeros)


@dataclass(frozen=True)
class TiledCodes:
    """Int4TilePackedTo4dTensor, the order of NVIDIA's tensor cores.

    `_weight_qdata` int32 [out / 8, in / 16n, 32, n / 2], of weights padded to 8 outputs and 1024 inputs. The word [o,
    i, lane, j] has the output `8o + lane / 4` and, from the lowest half byte on, the inputs `16n * i + 32j + 2 * (lane
    % 4) + (0, 8, 16, 24, 1, 9, 17, 25)`. With `_weight_scale_and_zero` [groups, out, 2]. A value is `(code - 8) * scale
    + zero`.
    """

    group_size: int
    _per: int = 8

    def is_in(self, layer: StoredLayer) -> bool:
        found = layer.find(_CODES)
        return found is not None and found.dtype == torch.int32 and len(found.shape) == 4

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size, kind = layer.out_features, layer.in_features, "_weight_scale_and_zero"
        padded_out, padded_in = -(-out // 8) * 8, -(-size // 1024) * 1024
        shape = layer.shape(_CODES, (padded_out // 8, padded_in // 128, 32, 4))
        padded_in = shape[1] * shape[3] * 32
        if shape[0] * 8 != padded_out or shape[2] != 32 or padded_in != -(-size // 1024) * 1024:
            raise layer.mismatch(_CODES, f"tiles of {padded_out} outputs and {-(-size // 1024) * 1024} inputs")
        words = layer.read(_CODES, shape, torch.int32, per=self._per)
        both = layer.shape(kind, (padded_in // self.group_size, padded_out, 2))
        if both[1:] != (padded_out, 2) or not both[0] or padded_in % both[0]:
            raise layer.mismatch(kind, f"scales and zeros of groups, [groups, {padded_out}, 2]")
        numbers = layer.read(kind, both, torch.float32, dim=None)[:, layer.rows.start : layer.rows.stop]
        scales, zeros = numbers.permute(2, 1, 0)
        group = padded_in // both[0]
        scales, zeros = (equal_groups(each[:, : -(-size // group)], size, group) for each in (scales, zeros))
        return _with_offsets(self._pairs(layer, words)[:, : size // 2].contiguous(), scales, zeros)

    def _pairs(self, layer: StoredLayer, words: Tensor) -> Tensor:
        """Unpacks the codes, two a byte, uint8 [outputs, padded inputs / 2]."""
        if words.is_meta:
            return words.new_empty((len(layer.rows), words.shape[1] * words.shape[3] * 16), dtype=torch.uint8)
        even, odd = words & 0xFFFF, (words >> 16) & 0xFFFF
        parts = [((even >> shift) & 15) | (((odd >> shift) & 15) << 4) for shift in (0, 4, 8, 12)]
        lanes = torch.stack([part.to(torch.uint8) for part in parts], dim=-1).unflatten(2, (8, 4))
        # [tile, part of inputs, output, lane % 4, word, 8 inputs] → an output's inputs one after another
        ordered = lanes.permute(0, 2, 1, 4, 5, 3).flatten(2).flatten(0, 1)
        return layer.trim(ordered, 0, self._per)


@dataclass(frozen=True)
class BlockScaled:
    """MXTensor and NVFP4Tensor: 4-bit codes two a byte, the lower half first, or float8.

    `_weight_scale` is [out, groups], or in the order of NVIDIA's tensor cores: pieces of 128 outputs and 4 groups, one
    after another, each as [32, 4, 4] of (output % 32, output / 32, group). `_weight_per_tensor_scale` exists if NVFP4
    has a scale for the tensor.

    Attributes:
        dtype, has_factor: expected where the tensors are not known.
        needs_factor: NVFP4 has a scale for the tensor in any case.
    """

    dtype: torch.dtype = torch.uint8
    has_factor: bool = False
    needs_factor: bool = False

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has(_CODES) and layer.stored_dtype(_SCALES, torch.float32).itemsize == 1

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size, factor = layer.out_features, layer.in_features, "_weight_per_tensor_scale"
        dtype = layer.stored_dtype(_CODES, self.dtype)
        if dtype not in (torch.uint8, *_FLOATS):
            raise layer.mismatch(_CODES, "codes of FP4, two a byte, or float8")
        codes = layer.read(_CODES, (out, size // 2 if dtype == torch.uint8 else size), dtype)
        expected = torch.float8_e4m3fn if self.has_factor else torch.float8_e8m0fnu
        kind = layer.stored_dtype(_SCALES, expected)
        if kind not in (torch.float8_e4m3fn, *EXPONENTS):
            raise layer.mismatch(_SCALES, "scales of float8_e4m3fn or float8_e8m0fnu")
        groups = size // (NV_GROUP if kind == torch.float8_e4m3fn else MX_GROUP)
        scales = self._in_order(layer, layer.shape(_SCALES, (out, groups)), kind, groups)
        scales = scales.float() if kind == torch.float8_e4m3fn else powers_of_two(scales)
        is_missing = self.needs_factor and layer.is_known and kind == torch.float8_e4m3fn
        if is_missing or layer.has(factor) or (not layer.is_known and self.has_factor):
            scales = scales * layer.scalar(factor)
        return QuantizedWeight(codes, scales, table(FP4, codes.device) if dtype == torch.uint8 else None)

    def _in_order(self, layer: StoredLayer, shape: tuple[int, ...], kind: torch.dtype, groups: int) -> Tensor:
        if shape == (layer.out_features, groups):
            return layer.read(_SCALES, shape, kind)
        padded = (-(-layer.out_features // 128) * 128) * (-(-groups // 4) * 4)
        if math.prod(shape) != padded:
            raise layer.mismatch(_SCALES, f"[{layer.out_features}, {groups}] scales, or {padded} in NVIDIA's order")
        stored = layer.read(_SCALES, shape, kind, dim=None)
        if stored.is_meta:
            return stored.new_empty((len(layer.rows), groups))
        pieces = stored.view(torch.uint8).view(-(-layer.out_features // 128), -(-groups // 4), 32, 4, 4)
        ordered = pieces.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)
        return ordered[layer.rows.start : layer.rows.stop, :groups].contiguous().view(kind)


@dataclass(frozen=True)
class Unsupported:
    """All other classes, which are refused."""

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has(_CODES)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        found = layer.find(_CODES)
        assert found is not None
        kind = str(found.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{layer.name}: torchao has its codes as {kind} {list(found.shape)}, a layout of one kind of device, which "
            "is not read. Take int8, float8, intx, or int4 in the packing plain or tile_packed_to_4d."
        )


def _with_offsets(pairs: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedWeight:
    """Builds the weight `(code - 8) * scale + zero`."""
    is_real = not zeros.is_meta
    offsets = None if is_real and not zeros.any() else zeros.contiguous()
    return QuantizedWeight(pairs, scales.contiguous(), table(INT4, pairs.device), offsets)

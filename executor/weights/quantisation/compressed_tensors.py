"""compressed-tensors: integers packed into words, sparse weights, and what other formats have under its names.

https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantisation.checkpoint_format import CheckpointFormat, Exclusions, Layout
from quire.executor.weights.quantisation.codes import integers, packed_integers, unpack
from quire.executor.weights.quantisation.four_bit_floats import Mxfp4, Nvfp4
from quire.executor.weights.quantisation.input_orders import ordered_integers, read_order
from quire.executor.weights.quantisation.stored_layer import StoredLayer
from quire.executor.weights.quantisation.whole_bytes import Float8, Int8Codes
from quire.ops.backend import LinearWeight
from quire.ops.quantised import QuantisedWeight


def read_format(config: Mapping[str, Any], dtype: torch.dtype) -> CheckpointFormat:
    """The format that `config` describes; a group of layers that it lists may have any of the layouts.

    Raises:
        ModelLoadError: weights in a layout of NVIDIA's sparse tensor cores, or turned by a transform.
    """
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, dict)]
    formats = {config.get("format"), *(group.get("format") for group in groups)}
    if "marlin-24" in formats:
        raise ModelLoadError("The format marlin-24 is a layout of one GPU's kernel; take pack-quantized instead.")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ModelLoadError("Weights that a transform (QuIP, SpinQuant) turned are not read; take others.")
    weights: dict[str, Any] = next((group["weights"] for group in groups if group.get("weights")), {})
    int8_codes = Int8Codes(_have_byte_inputs(groups))
    expected = _expected(weights, int8_codes, "nvfp4" in str(config.get("format")))
    block = tuple(weights.get("block_structure") or ()) or None
    layouts: list[Layout] = [
        Nvfp4("weight_packed", "weight_global_scale", divides=True), Mxfp4(), PackedIntegers(), Sparse24(),
        Float8(block=block), int8_codes,
    ]  # fmt: skip
    first = next((layout for layout in layouts if isinstance(layout, type(expected))), layouts[0])
    ordered = [expected, *(layout for layout in layouts if layout is not first)]
    return CheckpointFormat(ordered, Exclusions(config.get("ignore") or ()), dtype)


def _have_byte_inputs(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all layers with weights of int8 have activations of int8."""
    of_int8 = [group for group in groups if _is_int8(group.get("weights"))]
    return bool(of_int8) and all(_is_int8(group.get("input_activations")) for group in of_int8)


def _is_int8(numbers: Mapping[str, Any] | None) -> bool:
    return numbers is not None and (numbers.get("num_bits"), numbers.get("type", "int")) == (8, "int")


def _expected(weights: Mapping[str, Any], int8_codes: Int8Codes, is_nvfp4: bool) -> Layout:
    bits, kind = weights.get("num_bits", 4), weights.get("type", "int")
    if kind == "float":
        block = weights.get("block_structure")
        if bits == 8:
            return Float8(block=tuple(block) if block else None)
        is_nvfp4 = is_nvfp4 or weights.get("group_size") == 16
        return Nvfp4("weight_packed", "weight_global_scale", divides=True) if is_nvfp4 else Mxfp4()
    if bits == 8 and weights.get("strategy", "channel") in ("channel", "tensor"):
        return int8_codes
    is_ordered = weights.get("actorder") in (True, "group", "dynamic")
    return PackedIntegers(bits, weights.get("group_size") or -1, weights.get("symmetric", True), is_ordered)


@dataclass(frozen=True)
class PackedIntegers:
    """See `Layout`: `weight_packed` int32 [out, words], whose codes count from the smallest number.

    With `weight_scale` [out, groups], and perhaps `weight_zero_point` int32 [words, groups], packed along the outputs,
    and `weight_g_idx` [in], each input's group. The attributes are expected where the tensors are not known.
    """

    bits: int = 4
    group_size: int = -1
    is_symmetric: bool = True
    is_ordered: bool = False

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("weight_packed", torch.int32)

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        num_groups = 1 if self.group_size < 1 else -(-size // self.group_size)
        shape = layer.shape("weight_packed", (out, -(-size * self.bits // 32)))
        bits = round(32 * shape[1] / size)
        words = layer.read("weight_packed", shape, torch.int32)
        shape = layer.shape("weight_scale", (out, num_groups))
        scales = layer.read("weight_scale", shape, layer.scale_dtype("weight_scale")).reshape(len(words), -1)
        zeros = self._zeros(layer, bits, scales.shape[1])
        order = read_order(layer, "weight_g_idx", scales.shape[1], is_expected=self.is_ordered)
        if order is not None:
            return ordered_integers(_unpack_words(words, bits, size), bits, scales, zeros, order, layer.dtype)
        if bits == 4 and size % 2 == 0:
            return packed_integers(words.view(torch.uint8)[:, : size // 2].contiguous(), bits, scales, zeros)
        return integers(_unpack_words(words, bits, size), bits, scales, zeros)

    def _zeros(self, layer: StoredLayer, bits: int, num_groups: int) -> Tensor | None:
        kind = "weight_zero_point"
        if not layer.has(kind) and (layer.is_known or self.is_symmetric):
            return None
        num_words = -(-layer.out_features * bits // 32)
        words = layer.read(kind, layer.shape(kind, (num_words, num_groups)), torch.int32, dim=None)
        return _unpack_words(words.t(), bits, layer.out_features).t()[layer.rows.start : layer.rows.stop]


def _unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes uint8 [rows, count] of `words` [rows, …]. In older versions no code lies in two words."""
    if words.shape[-1] == -(-count * bits // 32):
        return unpack(words, bits, count)
    shifts = torch.arange(0, 32 - bits + 1, bits, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count].to(torch.uint8)


@dataclass(frozen=True)
class Sparse24:
    """See `Layout`: `sparse-24-bitmask`. `compressed` [out, in / 2] has the two of four numbers that `bitmask` names.

    `bitmask` [out, in / 8] uint8 has a bit for each number, the lowest first. Zeros are stored again when it is read.
    """

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("compressed") and layer.has("bitmask")

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        stored = layer.stored_dtype("compressed", layer.dtype)
        dtype = stored if stored.itemsize == 1 else layer.dtype
        shape = layer.shape("compressed", (out, size // 2))
        kept = layer.read("compressed", shape, dtype)
        mask = layer.read("bitmask", (out, -(-size // 8)), torch.uint8)
        dense = torch.zeros(len(kept), size, dtype=dtype, device=kept.device)
        if not kept.is_meta:
            number = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
            dense.view(number)[unpack(mask, 1, size).bool()] = kept.view(number).flatten()
        if dtype.itemsize > 1:
            return dense
        return QuantisedWeight(dense, layer.scales())

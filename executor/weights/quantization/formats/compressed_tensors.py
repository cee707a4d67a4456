"""The layer formats of compressed-tensors: integers packed into words, sparse weights, and other formats by its names.

https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.act_order import ordered_integers, read_order
from quire.executor.weights.quantization.bit_packing import integers, packed_integers, unpack
from quire.executor.weights.quantization.checkpoint_format import CheckpointFormat, Exclusions, LayerFormat
from quire.executor.weights.quantization.eight_bit import Float8, Int8Codes
from quire.executor.weights.quantization.fields import block, integer, mapping, names
from quire.executor.weights.quantization.formats.sparse_marlin import SparseMarlin
from quire.executor.weights.quantization.four_bit_floats import Mxfp4, Nvfp4, Nvfp4OfE5m3
from quire.executor.weights.quantization.groups import NV_GROUP, equal_groups, num_groups_of
from quire.executor.weights.quantization.log_once import WITHOUT_ZEROS, log_expanded
from quire.executor.weights.quantization.six_bit_floats import Mxfp6
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight


def read_format(config: Mapping[str, Any], dtype: torch.dtype) -> CheckpointFormat:
    """The format that `config` describes; a group of layers that it lists may have any of the layer formats.

    Raises:
        ModelLoadError: a transform rotates the weights.
    """
    groups = [group for group in mapping(config, "config_groups").values() if isinstance(group, Mapping)]
    if mapping(config, "transform_config").get("config_groups"):
        raise ModelLoadError("Weights that a transform (QuIP, SpinQuant) turned are not read; take others.")
    weights = [mapping(group, "weights") for group in groups if group.get("weights")]
    first = weights[0] if weights else {}
    is_nvfp4 = "nvfp4" in str(config.get("format")) or first.get("group_size") == NV_GROUP
    has_e5m3 = any("e5m3" in str(each.get("format")) for each in (config, *groups))
    layer_formats: Mapping[str, LayerFormat] = {
        **({"nvfp4-e5m3": Nvfp4OfE5m3()} if has_e5m3 else {}),
        "nvfp4": Nvfp4("weight_packed", "weight_global_scale", divides=True), "mxfp4": Mxfp4(),
        "mxfp6": Mxfp6(mantissa=3, weight="weight_packed"),
        "marlin": SparseMarlin(integer(first, "num_bits", 4), integer(first, "group_size", -1)),
        "packed": _packed(weights), "sparse": Sparse(), "float8": _float8(weights), "int8": _int8(groups, weights),
    }  # fmt: skip
    is_marlin = config.get("format") == "marlin-24"
    of_four_bits = "nvfp4-e5m3" if has_e5m3 else "nvfp4" if is_nvfp4 else "mxfp4"
    expected = "marlin" if is_marlin else _expected(first, of_four_bits)
    ordered = [
        layer_formats[expected],
        *(each for kind, each in layer_formats.items() if kind != expected),
    ]
    return CheckpointFormat(ordered, Exclusions(names(config, "ignore")), dtype)


def _expected(weights: Mapping[str, Any], of_four_bits: str) -> str:
    """The layer format of layers whose tensors are not known; `of_four_bits` is the one of 4-bit floats."""
    bits = integer(weights, "num_bits", 4)
    if weights.get("type", "int") == "float":
        return {8: "float8", 6: "mxfp6"}.get(bits, of_four_bits)
    return "int8" if bits == 8 and weights.get("strategy", "channel") in ("channel", "tensor") else "packed"


def _packed(weights: Sequence[Mapping[str, Any]]) -> "PackedIntegers":
    of_integers = [each for each in weights if each.get("type", "int") == "int"]
    if not of_integers:
        return of_any_bits()
    first = of_integers[0]
    bits = integer(first, "num_bits", 4)
    is_ordered = all(each.get("actorder") in (True, "group", "dynamic") for each in of_integers)
    all_bits = {integer(each, "num_bits", 4) for each in of_integers}
    for each in all_bits - set(range(1, 9)):
        raise ModelLoadError(f"config.json's quantization_config has {each} as num_bits; take integers of 1 to 8 bits.")
    others, size = tuple(all_bits - {bits}), integer(first, "group_size", -1)
    return PackedIntegers(bits, size, _are_symmetric(of_integers), is_ordered, others)


def of_any_bits(bits: int = 4) -> "PackedIntegers":
    """The layer format for a checkpoint whose configuration does not say the bits of single layers."""
    return PackedIntegers(bits, other_bits=tuple(range(1, 9)))


def _float8(weights: Sequence[Mapping[str, Any]]) -> Float8:
    """The float8 layer format, with the block or the groups of the first group of layers that has any."""
    of_bytes = [each for each in weights if (each.get("num_bits"), each.get("type")) == (8, "float")]
    blocks = [found for each in of_bytes if (found := block(each, "block_structure"))]
    groups = [(1, size) for each in of_bytes if (size := integer(each, "group_size", -1)) > 0]
    return Float8(block=next(iter((*blocks, *groups)), None))


def _int8(groups: Sequence[Mapping[str, Any]], weights: Sequence[Mapping[str, Any]]) -> Int8Codes:
    """The int8 layer format. Activations are quantized to int8 if they are for all layers with int8 weights."""
    of_int8 = [group for group in groups if _is_int8(mapping(group, "weights"))]
    have_byte_inputs = bool(of_int8) and all(_is_int8(mapping(group, "input_activations")) for group in of_int8)
    of_integers = [each for each in weights if each.get("type", "int") == "int"]
    sizes = [size for each in of_integers if (size := integer(each, "group_size", -1)) > 0]
    return Int8Codes(have_byte_inputs, sizes[0] if sizes else None, _are_symmetric(of_integers))


def _is_int8(numbers: Mapping[str, Any]) -> bool:
    return bool(numbers) and (numbers.get("num_bits"), numbers.get("type", "int")) == (8, "int")


def _are_symmetric(weights: Sequence[Mapping[str, Any]]) -> bool:
    """Returns True if a layer may lack zero points. The layer's group in the config is not looked up."""
    return not weights or any(each.get("symmetric", True) for each in weights)


@dataclass(frozen=True)
class PackedIntegers:
    """Codes `weight_packed` int32 [out, words], which count from the smallest value.

    With `weight_scale` [out, groups], and perhaps `weight_zero_point` int32 [words, groups], packed along the outputs,
    and `weight_g_idx` [in], each input's group. The attributes are expected where the tensors are not known;
    `other_bits` are the widths of codes in some layers.
    """

    bits: int = 4
    group_size: int = -1
    is_symmetric: bool = True
    is_ordered: bool = False
    other_bits: tuple[int, ...] = ()

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("weight_packed", torch.int32)

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        bits, num_words = self._form(layer)
        words = layer.read("weight_packed", (out, num_words), torch.int32)
        shape = layer.shape("weight_scale", (out, num_groups_of(size, self.group_size)))
        is_one = shape == (1,) and not layer.has("weight_zero_point")
        if shape[:1] != (out,) and not is_one:
            raise layer.mismatch("weight_scale", f"scales of each of {out} outputs, or one for all (symmetric: true)")
        scales = layer.read("weight_scale", shape, layer.scale_dtype("weight_scale"), dim=None if is_one else 0)
        scales = scales.expand(len(words)).unsqueeze(1).contiguous() if is_one else scales.reshape(len(words), -1)
        num_groups = scales.shape[1]
        zeros = self._zeros(layer, bits, num_groups)
        if self.is_ordered and layer.is_known and not layer.has("weight_g_idx"):
            raise layer.mismatch("weight_g_idx", "each input's group (actorder)")
        order = read_order(layer, "weight_g_idx", num_groups, self.group_size, is_expected=self.is_ordered)
        if order is not None:
            return ordered_integers(_unpack_words(words, bits, size), bits, scales, zeros, order, layer.dtype)
        group = layer.group_size("weight_scale", num_groups, self.group_size)
        scales, zeros = equal_groups(scales, size, group), None if zeros is None else equal_groups(zeros, size, group)
        if bits == 4 and size % 2 == 0:
            return packed_integers(words.view(torch.uint8)[:, : size // 2].contiguous(), bits, scales, zeros)
        return integers(_unpack_words(words, bits, size), bits, scales, zeros)

    def _form(self, layer: StoredLayer) -> tuple[int, int]:
        """Returns the bits of a code, which may differ from layer to layer, and the words of an output.

        Raises:
            ModelLoadError: no expected width of codes fits the words.
        """
        size = layer.in_features
        shape = layer.shape("weight_packed", (layer.out_features, -(-size * self.bits // 32)))
        counts = [(bits, -(-size * bits // 32)) for bits in (self.bits, *self.other_bits)]
        counts.append((self.bits, -(-size // (32 // self.bits))))  # older versions: no code crosses a word's end
        for bits, count in counts:
            if shape == (layer.out_features, count):
                return bits, count
        bits_of_all = " or ".join(map(str, (self.bits, *self.other_bits)))
        raise layer.mismatch("weight_packed", f"codes of {bits_of_all} bits in words, row by row")

    def _zeros(self, layer: StoredLayer, bits: int, num_groups: int) -> Tensor | None:
        kind = "weight_zero_point"
        if not layer.has(kind) and (layer.is_known or self.is_symmetric):
            if self.is_symmetric:
                return None
            raise layer.mismatch(kind, "zero points (symmetric: false)")
        counts = (-(-layer.out_features * bits // 32), -(-layer.out_features // (32 // bits)))  # see `_form`
        shape = layer.shape(kind, (counts[0], num_groups))
        if shape not in [(count, num_groups) for count in counts]:
            raise layer.mismatch(kind, f"zero points of {num_groups} groups in words of {bits} bits, output by output")
        words = layer.read(kind, shape, torch.int32, dim=None)
        return _unpack_words(words.t(), bits, layer.out_features).t()[layer.rows.start : layer.rows.stop]


def _unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks codes uint8 [rows, count] from `words` [rows, …]. In older versions no code crosses a word's end."""
    if words.shape[-1] == -(-count * bits // 32):
        return unpack(words, bits, count)
    shifts = torch.arange(0, 32 - bits + 1, bits, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count].to(torch.uint8)


@dataclass(frozen=True)
class Sparse:
    """Sparse floats: `sparse-24-bitmask` and `sparse-bitmask`. Reading stores the zeros again.

    `bitmask` [out, in / 8] uint8 has a bit for each element, the lowest first. A set bit marks an element that
    `compressed` holds. In the first format that is [out, in / 2], two of four elements; in the other it is one
    dimension with all nonzero elements of the layer.
    """

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("compressed") and layer.has("bitmask")

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        stored = layer.stored_dtype("compressed", layer.dtype)
        if not stored.is_floating_point:
            raise layer.mismatch("compressed", "floats")
        dtype = stored if stored.itemsize == 1 else layer.dtype
        shape = layer.shape("compressed", (out, size // 2))
        is_flat = len(shape) == 1
        if not is_flat and shape != (out, size // 2):
            raise layer.mismatch("compressed", "two of four numbers")
        log_expanded(dtype, WITHOUT_ZEROS)
        kept = layer.read("compressed", shape, dtype, dim=None if is_flat else 0).flatten()
        mask = layer.read("bitmask", (out, -(-size // 8)), torch.uint8, dim=None if is_flat else 0)
        dense = torch.zeros(len(layer.rows), size, dtype=dtype, device=kept.device)
        if not kept.is_meta:
            number = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
            places = unpack(mask, 1, size).bool()
            if places.sum() != len(kept):
                raise layer.mismatch("compressed", f"{int(places.sum())} numbers, as many as bitmask has bits")
            if is_flat:
                before, places = places[: layer.rows.start], places[layer.rows.start : layer.rows.stop]
                kept = kept[int(before.sum()) :][: int(places.sum())]
            dense.view(number)[places] = kept.view(number)
        if dtype.itemsize > 1:
            return dense
        return QuantizedWeight(dense, layer.scales())

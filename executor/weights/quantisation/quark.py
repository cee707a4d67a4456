"""AMD's Quark: which layouts its config describes, and the one that it alone has. https://quark.docs.amd.com"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantisation.awq import GEMM, PackedOutputs
from quire.executor.weights.quantisation.checkpoint_format import Layout
from quire.executor.weights.quantisation.codes import PER_WORD, integers, unpack, zeros_of_signed
from quire.executor.weights.quantisation.fields import block, integer, mapping
from quire.executor.weights.quantisation.four_bit_floats import Mxfp4, Nvfp4
from quire.executor.weights.quantisation.six_bit_floats import Mxfp6
from quire.executor.weights.quantisation.stored_layer import StoredLayer
from quire.executor.weights.quantisation.whole_bytes import Float8, Int8Codes
from quire.ops.quantised import QuantisedWeight

_Numbers = Mapping[str, Any]
"""What Quark says of one rounding of numbers."""

_NVFP4 = ("fp4", "fp8_e4m3")
"""Numbers that are rounded to the first, and the scales of their groups to the second."""
_INT4_OF_FP8 = (("fp8_e4m3", "int4"), ("fp8_e4m3", "uint4"))
"""Numbers that are rounded to the first, and then to the second, with scales of both."""


def quark_layouts(config: Mapping[str, Any]) -> Sequence[Layout]:
    """Those that the layers may have; first the one that the config says.

    Raises:
        ModelLoadError: numbers that are rounded twice, or two types of 6 bits, which tensors do not tell apart.
    """
    of_all, of_layers = mapping(config, "global_quant_config"), mapping(config, "layer_quant_config")
    settings = [of_all, *(mapping(of_layers, name) for name in of_layers)]
    roundings = [found for each in settings if (found := _roundings(each, "weight"))]
    for each in roundings:
        _check(each)
    dtypes = {str(each[0].get("dtype")) for each in roundings}
    if {"fp6_e2m3", "fp6_e3m2"} <= dtypes:
        raise ModelLoadError("Quark's fp6_e2m3 and fp6_e3m2 in one checkpoint are not read; take one with either.")
    weight, *more = _roundings(of_all, "weight") or [{}]
    inputs = (_roundings(of_all, "input_tensors") or [{}])[0]
    dtype, packing = str(weight.get("dtype", "int8")), str(mapping(config, "export").get("pack_method", "reorder"))
    places = GEMM if packing == "reorder" else tuple(range(PER_WORD))
    int4 = [each[-1] for each in roundings if each[-1].get("dtype") in ("int4", "uint4")]
    if len({each["dtype"] for each in int4}) > 1:
        raise ModelLoadError("Quark's int4 and uint4 in one checkpoint are not read; take one with either.")
    is_signed = not int4 or int4[0]["dtype"] == "int4"
    has_zeros = bool(int4) and all(each.get("symmetric", is_signed) is False for each in int4)
    group_size = integer(weight, "group_size", 128)
    layouts: dict[str, Layout] = {
        "rows": PackedRows(places, is_signed=is_signed, has_zeros=has_zeros, is_of_fp8=bool(more)),
        "fp4": Mxfp4("weight"),
        "nvfp4": Nvfp4("weight", "weight_scale_2", divides=False),
        "fp6": Mxfp6(mantissa=3 if "fp6_e2m3" in dtypes else 2),
        "fp8": Float8(block=next((size for each in roundings if (size := block(each[0], "block_size"))), None)),
        "int8": Int8Codes(str(inputs.get("dtype")) == "int8"),
        "int4": PackedOutputs(
            "weight", "weight_zero_point", "weight_scale", 4, places, is_signed, group_size, has_zeros
        ),
    }
    kind = dtype.replace("uint", "int").partition("_")[0]
    if more:
        kind = "nvfp4" if dtype == "fp4" else "rows"
    elif kind == "int4" and weight.get("qscheme") in ("per_channel", "per_tensor"):
        kind = "rows"
    first = layouts.get(kind, layouts["int8"])
    return [first, *(layout for layout in layouts.values() if layout is not first)]


def _roundings(setting: Mapping[str, Any], kind: str) -> list[_Numbers]:
    """How numbers of a `kind` are rounded: not, once, or twice."""
    given = setting.get(kind)
    listed = given if isinstance(given, list) else [given]
    return [mapping({kind: each}, kind) for each in listed if each]


def _check(roundings: Sequence[_Numbers]) -> None:
    dtypes = tuple(str(each.get("dtype")) for each in roundings)
    if len(dtypes) > 1 and dtypes not in (_NVFP4, *_INT4_OF_FP8):
        raise ModelLoadError(
            f"Quark's weights that are rounded twice, here to {' and '.join(dtypes)} (quantization_config's weight), "
            "are read only as NVFP4 (fp4 and fp8_e4m3) and INT4-FP8 (fp8_e4m3 and int4). Take a checkpoint with one "
            "rounding, such as fp8_e4m3 or int4."
        )


@dataclass(frozen=True)
class PackedRows:
    """See `Layout`: int4 with a scale an output (or one): `weight` int32 [out, in / 8], whose zero points are int32
    [out / 8], and `weight_scale` [out]. Numbers that were rounded to FP8 before have the scale of that as
    `weight_scale`, and `weight_scale_2` [out].

    Attributes:
        places: where each of eight inputs lies in a word.
        is_signed: codes are numbers from -8 to 7 instead of from 0 to 15.
        has_zeros: whether there have to be zero points.
        is_of_fp8: expected where the tensors are not known.
    """

    places: tuple[int, ...]
    is_signed: bool = True
    has_zeros: bool = False
    is_of_fp8: bool = False

    def is_in(self, layer: StoredLayer) -> bool:
        scales = layer.find("weight_scale_2") or layer.find("weight_scale")
        return layer.has("weight", torch.int32) and scales is not None and len(scales.shape) < 2

    def read(self, layer: StoredLayer) -> QuantisedWeight:
        out, size = layer.out_features, layer.in_features
        codes = self._unpacked(layer.read("weight", (out, -(-size // PER_WORD)), torch.int32))[:, :size]
        scales = layer.scales("weight_scale")
        if layer.has("weight_scale_2") or (not layer.is_known and self.is_of_fp8):
            scales = scales.float() * layer.scales("weight_scale_2").float()
        kind, zeros = "weight_zero_point", None
        if self.has_zeros or layer.has(kind):
            if layer.is_known and not layer.has(kind):
                raise layer.misfit(kind, "zero points (symmetric: false)")
            words = layer.read(kind, (-(-out // PER_WORD),), torch.int32, dim=None)
            zeros = self._unpacked(words.unsqueeze(0)).t()[layer.rows.start : layer.rows.stop]
            zeros = zeros_of_signed(zeros) if self.is_signed else zeros
        if size % 2:
            raise ModelLoadError(f"{layer.name}: {size} inputs are an odd number, which codes of four bits cannot be.")
        return integers((codes ^ 8 if self.is_signed else codes).contiguous(), 4, scales, zeros)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        codes = unpack(words, 4, words.shape[1] * PER_WORD)
        return codes.unflatten(1, (-1, PER_WORD))[..., list(self.places)].flatten(1)

"""AMD's Quark: which layouts its config describes. https://quark.docs.amd.com"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantisation.awq import quark_int4
from quire.executor.weights.quantisation.checkpoint_format import Layout
from quire.executor.weights.quantisation.fields import block, integer, mapping
from quire.executor.weights.quantisation.four_bit_floats import Mxfp4, Nvfp4
from quire.executor.weights.quantisation.six_bit_floats import Mxfp6
from quire.executor.weights.quantisation.whole_bytes import Float8, Int8Codes

_Numbers = Mapping[str, Any]
"""What Quark says of one rounding of numbers."""

_NVFP4 = ("fp4", "fp8_e4m3")
"""Numbers that are rounded to the first, and the scales of their groups to the second."""


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
    int4 = quark_int4(
        packing,
        is_signed=dtype == "int4",
        group_size=integer(weight, "group_size", 128),
        has_zeros=weight.get("symmetric") is not True,
    )
    layouts: dict[str, Layout] = {
        "fp4": Mxfp4("weight"),
        "nvfp4": Nvfp4("weight", "weight_scale_2", divides=False),
        "fp6": Mxfp6(mantissa=3 if "fp6_e2m3" in dtypes else 2),
        "fp8": Float8(block=next((size for each in roundings if (size := block(each[0], "block_size"))), None)),
        "int8": Int8Codes(str(inputs.get("dtype")) == "int8"),
        "int4": int4,
    }
    kind = "nvfp4" if more else dtype.replace("uint", "int").partition("_")[0]
    first = layouts.get(kind, layouts["int8"])
    return [first, *(layout for layout in layouts.values() if layout is not first)]


def _roundings(setting: Mapping[str, Any], kind: str) -> list[_Numbers]:
    """How numbers of a `kind` are rounded: not, once, or twice."""
    given = setting.get(kind)
    listed = given if isinstance(given, list) else [given]
    return [mapping({kind: each}, kind) for each in listed if each]


def _check(roundings: Sequence[_Numbers]) -> None:
    dtypes = tuple(str(each.get("dtype")) for each in roundings)
    if len(dtypes) > 1 and dtypes != _NVFP4:
        raise ModelLoadError(
            f"Quark's weights that are rounded twice, here to {' and '.join(dtypes)} (quantization_config's weight), "
            "are read only as NVFP4 (fp4 and fp8_e4m3). Take a checkpoint with one rounding, such as fp8_e4m3 or int4."
        )

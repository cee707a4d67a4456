"""The layer formats that the config of AMD's Quark describes. https://quark.docs.amd.com"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import PER_WORD
from quire.executor.weights.quantization.checkpoint_format import LayerFormat
from quire.executor.weights.quantization.eight_bit import Float8, Int8Codes
from quire.executor.weights.quantization.fields import block, integer, mapping
from quire.executor.weights.quantization.formats.awq import GEMM, PackedOutputs
from quire.executor.weights.quantization.formats.quark_integers import Columns, PackedInt3, PackedRows
from quire.executor.weights.quantization.four_bit_floats import Mxfp4, Nvfp4
from quire.executor.weights.quantization.six_bit_floats import Mxfp6
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.linear import LinearWeight

_Numbers = Mapping[str, Any]
"""Quark's parameters of one rounding."""

_ZEROS, _SECOND = "weight_zero_point", "weight_scale_2"
_NVFP4 = ("fp4", "fp8_e4m3")
"""Weights that are rounded to the first dtype, and whose groups' scales are rounded to the second."""
_DTYPES = {
    *("int2", "int3", "int4", "uint4", "int8", "uint8", "fp8_e4m3", "fp8_e5m2", "fp4", "fp6_e2m3", "fp6_e3m2"),
    *("float16", "bfloat16", "float32"),
}
_COLUMNS = {"int8": torch.int8, "uint8": torch.uint8, "int2": torch.int32}
"""Dtypes whose groups lie in columns, and the torch types of their codes."""
_INT4_OF_FP8 = (("fp8_e4m3", "int4"), ("fp8_e4m3", "uint4"))
"""Weights that are rounded to the first dtype, then to the second, with scales of both."""


def quark_formats(config: Mapping[str, Any]) -> Sequence[LayerFormat]:
    """Lists the layer formats that the layers may have; first the one that the config describes.

    Raises:
        ModelLoadError: weights that are rounded twice, or two 6-bit types, which tensors do not tell apart.
    """
    of_types, of_layers = mapping(config, "layer_type_quant_config"), mapping(config, "layer_quant_config")
    # A layer's setting is found by name, else by type, else it is the global one. Only type "Linear" is read here.
    of_all = mapping(of_types, "Linear") or mapping(config, "global_quant_config")
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
    if packing not in ("reorder", "order"):
        raise ModelLoadError(
            f"config.json's quantization_config has {packing!r} as pack_method, which is not read; take a checkpoint "
            "with reorder or order."
        )
    places = GEMM if packing == "reorder" else tuple(range(PER_WORD))
    int4 = [each[-1] for each in roundings if each[-1].get("dtype") in ("int4", "uint4")]
    if len({each["dtype"] for each in int4}) > 1:
        raise ModelLoadError("Quark's int4 and uint4 in one checkpoint are not read; take one with either.")
    is_signed = not int4 or int4[0]["dtype"] == "int4"
    has_zeros = bool(int4) and all(each.get("symmetric", is_signed) is False for each in int4)
    group_size, is_of_groups = integer(weight, "group_size", 128), weight.get("qscheme") == "per_group"
    layer_formats: dict[str, LayerFormat] = {
        "rows": PackedRows(places, is_signed=is_signed, has_zeros=has_zeros, is_of_fp8=bool(more)),
        "columns": Columns(_COLUMNS.get(dtype, torch.int8), group_size, _is_asymmetric(of_all)),
        "int3": PackedInt3(group_size if is_of_groups else None, _is_asymmetric(of_all)),
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
    elif dtype in _COLUMNS and is_of_groups:
        kind = "columns"
    first = layer_formats.get(kind, layer_formats["int8"])
    ordered = [first, *(layer_format for layer_format in layer_formats.values() if layer_format is not first)]
    needs = {pattern: _needs(mapping(of_layers, pattern)) for pattern in of_layers}
    return [CheckedFormat(layer_format, needs, _needs(of_all)) for layer_format in ordered]


def _needs(setting: _Numbers) -> Mapping[str, str]:
    """Maps the tensors that a layer needs besides codes and scales to the setting that asks for them."""
    needs = {_ZEROS: "zero points (symmetric: false)"} if _is_asymmetric(setting) else {}
    is_twice = len(_roundings(setting, "weight")) > 1
    return needs | ({_SECOND: "scales of the second rounding of its weight"} if is_twice else {})


def _is_asymmetric(setting: _Numbers) -> bool:
    """Returns True if the weights of a setting are integers with zero points."""
    last = (_roundings(setting, "weight") or [{}])[-1]
    dtype = str(last.get("dtype"))
    return "int" in dtype and last.get("symmetric", not dtype.startswith("u")) is False


@dataclass(frozen=True)
class CheckedFormat:
    """Another layer format, with a check that each layer has the tensors which its configuration asks for.

    Attributes:
        of_layers: needed tensors by a layer's name, or else by the first matching pattern.
        of_others: needed tensors of layers that match none.
    """

    layer_format: LayerFormat
    of_layers: Mapping[str, Mapping[str, str]]
    of_others: Mapping[str, str]

    def is_in(self, layer: StoredLayer) -> bool:
        return self.layer_format.is_in(layer)

    def read(self, layer: StoredLayer) -> LinearWeight:
        needs = self._needs(layer.name)
        for kind, what in needs.items():
            if layer.is_known and not layer.has(kind):
                raise layer.mismatch(kind, what)
        return self.layer_format.read(replace(layer, is_symmetric=_ZEROS not in needs))

    def _needs(self, name: str) -> Mapping[str, str]:
        """Looks up a layer's own name before patterns, as Quark's `setup_config_per_layer` does."""
        if name in self.of_layers:
            return self.of_layers[name]
        fitting = (needs for pattern, needs in self.of_layers.items() if fnmatch.fnmatch(name, pattern))
        return next(fitting, self.of_others)


def _roundings(setting: Mapping[str, Any], kind: str) -> list[_Numbers]:
    """Lists the roundings of tensors of a `kind`: none, one or two."""
    given = setting.get(kind)
    listed = given if isinstance(given, list) else [given]
    return [mapping({kind: each}, kind) for each in listed if each]


def _check(roundings: Sequence[_Numbers]) -> None:
    dtypes = tuple(str(each.get("dtype", "int8")) for each in roundings)
    for dtype in set(dtypes) - _DTYPES:
        raise ModelLoadError(
            f"config.json's quantization_config has {dtype!r} as a weight's dtype, which is not read of Quark; take a "
            "checkpoint in int8, int4, fp8_e4m3 or fp4."
        )
    if len(dtypes) > 1 and dtypes not in (_NVFP4, *_INT4_OF_FP8):
        raise ModelLoadError(
            f"Quark's weights that are rounded twice, here to {' and '.join(dtypes)} (quantization_config's weight), "
            "are read only as NVFP4 (fp4 and fp8_e4m3) and INT4-FP8 (fp8_e4m3 and int4). Take a checkpoint with one "
            "rounding, such as fp8_e4m3 or int4."
        )

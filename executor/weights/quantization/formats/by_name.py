"""Maps a quantized checkpoint's format, as config.json names it, to the layer formats that its config describes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.checkpoint_format import CheckpointFormat, Exclusions, LayerFormat
from quire.executor.weights.quantization.eight_bit import Float8, Int8Codes
from quire.executor.weights.quantization.fields import block, integer, mapping, names
from quire.executor.weights.quantization.formats import compressed_tensors, torchao
from quire.executor.weights.quantization.formats.awq import InterleavedRows, PackedInputs, awq_gemm
from quire.executor.weights.quantization.formats.bitsandbytes import BlockFloat4, RowInt8
from quire.executor.weights.quantization.formats.gptq import Gptq
from quire.executor.weights.quantization.formats.hqq import Hqq
from quire.executor.weights.quantization.formats.modelopt import LOW_RANK, PairedOutputs
from quire.executor.weights.quantization.formats.quark import quark_formats
from quire.executor.weights.quantization.four_bit_floats import MX_INT4, Mxfp4, Nvfp4, Nvfp4OfE5m3
from quire.executor.weights.quantization.scaled_inputs import ScaledInputs

Config = Mapping[str, Any]
_IN_BLOCKS = {"FP8_PB_WO", "FP8_PB_REAL", "MIXED_PRECISION"}
"""ModelOpt's algorithms whose scales may be those of blocks."""


def _gptq(config: Config) -> list[LayerFormat]:
    return [Gptq.of(config)]


def _awq(config: Config) -> list[LayerFormat]:
    version = str(config.get("version", "gemm")).lower()
    if version not in ("gemm", "exllama", "marlin", "ipex", "gemv", "gemv_fast"):
        raise ModelLoadError(f"AWQ in the order {version} is not read; take one in the order gemm, gemv or gemv_fast.")
    bits = integer(config, "bits", integer(config, "w_bit", 4))
    if not 4 <= bits <= 8 or (bits > 4 and version.startswith("gemv")):
        raise ModelLoadError(f"AWQ of {bits} bits in the order {version} is not read; take a checkpoint of 4 bits.")
    group_size = integer(config, "group_size", integer(config, "q_group_size", 128))
    if version.startswith("gemv"):
        if not config.get("group_size", config.get("q_group_size")):
            raise ModelLoadError(
                f"config.json's quantization_config has no group_size, which AWQ in the order {version} does not tell "
                "otherwise: its scales are in longer rows than there are groups. Add it."
            )
        return [PackedInputs(group_size) if version == "gemv" else InterleavedRows(group_size)]
    return [awq_gemm(bits, group_size, has_zeros=bool(config.get("zero_point", True)))]


def _auto_round(config: Config) -> list[LayerFormat]:
    """The layer formats of AutoRound (arXiv:2309.05516), which writes those of other formats."""
    packing = f"{config.get('packing_format') or 'auto_round:auto_gptq'} {config.get('backend') or ''}"
    sizes = size if isinstance(size := config.get("group_size"), (list, tuple)) else None
    if "awq" in packing:
        return _awq(config)
    if "llm_compressor" in packing:
        nvfp4 = Nvfp4("weight_packed", "weight_global_scale", divides=True)
        others: list[LayerFormat] = [
            Float8(),
            nvfp4,
            Mxfp4(),
            Int8Codes(has_byte_inputs=True),
            compressed_tensors.of_any_bits(),
        ]
        return [Nvfp4OfE5m3(), *others] if "e5m3" in packing else others
    if config.get("data_type") == "mx_int":
        return [Mxfp4(values=MX_INT4)]
    if "fp8" in packing or sizes or config.get("data_type") == "fp":
        return _fp8({"weight_block_size": sizes})
    if config.get("packing_format") == "auto_round":  # GPTQ's words, with zero points stored unshifted
        return [Gptq.of({**config, "checkpoint_format": "gptq_v2"})]
    if "gptq" in packing or config.get("sym", False):
        return [Gptq.of(config)]
    raise ModelLoadError(
        f"AutoRound's packing {packing.strip()} is not read; take auto_round:auto_gptq or auto_round:auto_awq."
    )


def _fp8(config: Config) -> list[LayerFormat]:
    sizes = block(config, "weight_block_size")
    by_block, by_tensor = Float8("weight_scale_inv", sizes), Float8("weight_scale", sizes)
    if sizes is None:
        return [by_tensor, by_block]
    return [
        by_block,
        by_tensor,
        Float8("scale", sizes),
        Mxfp4("weight", "scale", torch.int8),
    ]  # the last two are DeepSeek V4's


def _modelopt(config: Config) -> list[LayerFormat]:
    """The layer formats of NVIDIA's Model Optimizer."""
    algorithm = str(config.get("quant_algo", "FP8")).upper()
    layers = mapping(config, "quantized_layers")
    algorithms = {algorithm, *(str(mapping(layers, name).get("quant_algo")).upper() for name in layers)}
    # W4A8_... rounds codes times scales to FP8 by way of `weight_scale_2` and multiplies there; here nothing is rounded
    layer_formats: dict[str, LayerFormat] = {
        "NVFP4": Nvfp4("weight", "weight_scale_2", divides=False, group=32 if algorithm.startswith("W4A8") else 16),
        "AWQ": PairedOutputs(integer(config, "group_size", 128) or 128),
        "MXFP4": Mxfp4("weight"),
        "W8A": Int8Codes(has_byte_inputs=algorithm.startswith("W8A8")),
        "": Float8(block=(128, 128) if algorithms & _IN_BLOCKS else None),
    }
    first = next(kind for kind in layer_formats if kind in algorithm)
    ordered = [layer_formats.pop(first), *layer_formats.values()]
    return [ScaledInputs(layer_format, low_rank=LOW_RANK) for layer_format in ordered]


def _bitsandbytes(config: Config) -> list[LayerFormat]:
    kind, is_nested = config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_use_double_quant", False)
    by_row, by_block = RowInt8(), BlockFloat4(kind, is_nested=is_nested)
    return [by_row, by_block] if config.get("load_in_8bit") else [by_block, by_row]


def _hqq(config: Config) -> list[LayerFormat]:
    return [Hqq.of(config)]


_LAYER_FORMATS: Mapping[str, Callable[[Config], Sequence[LayerFormat]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: [Float8()],
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "quark": quark_formats,
    "torchao": torchao.layer_formats,
}
NAMES = ("compressed-tensors", *_LAYER_FORMATS, "mxfp4")
"""The formats that are read. MXFP4 is for experts only; the families that have it read them themselves."""

_SPELLINGS = {
    **dict.fromkeys(("gptq_marlin", "auto_gptq"), "gptq"),
    **dict.fromkeys(("awq_marlin", "auto_awq"), "awq"),
    **dict.fromkeys(("intel/auto-round", "auto_round", "auto_round:fp8", "autoround", "inc"), "auto-round"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8"), "modelopt"),
    **dict.fromkeys(("compressed_tensors", "sparseml"), "compressed-tensors"),
    **dict.fromkeys(("gpt_oss_mxfp4",), "mxfp4"),
    **dict.fromkeys(("mxfp8", "deepseek_v4_fp8"), "fp8"),
}
_EXCLUDED = (
    *("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "skip_modules"),
    "llm_int8_skip_modules",
)
"""Fields that list unquantized layers."""


def canonical(name: str) -> str:
    """Returns the one name of a format that configs and command lines spell in several ways."""
    name = name.lower().replace(" ", "")
    return _SPELLINGS.get(name, name)


def read_format(method: str, config: Config, dtype: torch.dtype) -> CheckpointFormat:
    """Builds the format of a checkpoint whose `method` is one of `NAMES`; `config` is its quantization config.

    Raises:
        ModelLoadError: a variant that is not read.
    """
    if method == "compressed-tensors":
        return compressed_tensors.read_format(config, dtype)
    excluded = [name for field in _EXCLUDED for name in names(config, field)]
    if not config.get("lm_head"):
        excluded.append("lm_head")
    return CheckpointFormat(_LAYER_FORMATS[method](config), Exclusions(excluded), dtype)

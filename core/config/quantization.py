"""Options: formats in which a checkpoint's weights are, or are made as they are loaded."""

import re
import shlex
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import ConfigError

MadeAtLoad = Literal[
    "int8", "int4", "fp8", "fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4", "bitsandbytes",
    "int8_per_channel_weight_only", "experts_int8", "fp8_per_channel",
]  # fmt: skip
"""Formats to which weights of 16 and 32 bits are rounded."""

QuantizationName = Literal[
    MadeAtLoad,
    "compressed-tensors", "gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq", "auto-round", "inc",
    "fbgemm_fp8", "deepseek_v4_fp8", "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8",
    "hqq", "quark", "gpt_oss_mxfp4", "moe_wna16", "torchao", "gguf",
    "online",
]  # fmt: skip
"""`MadeAtLoad`, and names of checkpoints' own formats, as some of those are, too. `online` is `QuantizationConfig`."""

WeightFormat = Literal[
    MadeAtLoad,
    "fp8_per_tensor_static", "fp8_per_channel_static", "fp8_per_block_static", "int8_per_channel_static",
]  # fmt: skip
"""`MadeAtLoad`, and what vLLM calls the weights of some of them."""


class LayerFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of one kind of layer. `weight` is None for layers that stay as they are; unset, `--quantization`
    decides."""

    weight: WeightFormat | UnsetType | None = UNSET
    activation: Any = None

    def __post_init__(self) -> None:
        if self.activation is not None:
            raise ValueError(
                "activation is not chosen by layer: leave it out, or null. QUIRE_CPU_ACTIVATION_BITS is for all layers"
            )


class QuantizationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Formats that are made at load, by kind of layer or by name.

    Attributes:
        linear, moe: of linear layers, and of routed experts. None: `--quantization` says it, or they stay as they are.
        ignore: layers that stay as they are, by names, parts of names (`o_proj`), or patterns (`re:…`, or with `*`).
        targets: formats by such names and patterns, instead of `linear` and `moe`; other layers stay as they are.
    """

    linear: WeightFormat | LayerFormat | None = None
    moe: WeightFormat | LayerFormat | None = None
    ignore: list[str] = []
    targets: dict[str, MadeAtLoad] | None = None

    def __post_init__(self) -> None:
        if self.targets and (self.linear, self.moe) != (None, None):
            raise ValueError("targets says the format of each layer: leave linear and moe out")
        targets = self.targets or {}
        for field, names in (("ignore", self.ignore), ("targets", targets)):
            for name in names:
                if name.startswith("re:"):
                    _check_pattern(field, name)
        both = [name for name in self.ignore if name in targets]
        if both:
            raise ValueError(f"{' and '.join(both)} is in both ignore and targets: leave it in one of them")

    def over(self, base: QuantizationName | None) -> "QuantizationConfig":
        """The combination of both options; its `linear` and `moe` are names or None.

        Raises:
            ConfigError: they contradict each other, or no layer is to be made smaller.
        """
        if base == "online":
            base = None
        if base is not None and base not in get_args(MadeAtLoad):
            raise ConfigError(
                f"--quantization-config is for weights that are made smaller as they are loaded, and --quantization "
                f"{base} names a format of checkpoints: leave one of them out."
            )
        if base is not None and self.targets:
            raise ConfigError(
                f"--quantization-config's targets says the format of each layer: leave --quantization {base} out."
            )
        linear, moe = (_format(each, base) for each in (self.linear, self.moe))
        if (linear, moe, self.targets or None) == (None, None, None):
            raise ConfigError(
                "--quantization-config names no format: give it linear, moe or targets, or give --quantization."
            )
        return msgspec.structs.replace(self, linear=linear, moe=moe)


def _check_pattern(field: str, name: str) -> None:
    try:
        re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{field} has {name}, which is no regular expression after re: ({error})") from None


def _format(asked: WeightFormat | LayerFormat | None, base: Any) -> Any:
    """The name of a format, or None."""
    if isinstance(asked, LayerFormat):
        return base if asked.weight is UNSET else asked.weight
    return base if asked is None else asked


Quantization = QuantizationName | QuantizationConfig
"""What is asked for; a config as `over` makes it."""


def short_name(quantization: Quantization | None) -> str | None:
    """The value of `--quantization`, or the flag that says more."""
    return quantization if isinstance(quantization, str) else quantization_flags(quantization).strip() or None


def in_words(quantization: Quantization | None) -> str:
    """The flags that ask for it, also where none does."""
    return quantization_flags(quantization).strip() or "no --quantization"


def quantization_flags(quantization: Quantization | None) -> str:
    """The flags that ask for it, after a space; nothing for nothing."""
    if isinstance(quantization, QuantizationConfig):
        asked: Mapping[str, Any] = {name: value for name, value in msgspec.to_builtins(quantization).items() if value}
        return f" --quantization-config {shlex.quote(msgspec.json.encode(asked, order='deterministic').decode())}"
    return f" --quantization {quantization}" if quantization else ""

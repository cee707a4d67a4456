"""Chooses the scheme of a model's linear layers."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quire.core import checkpoint_file
from quire.core.config.quantization import Quantization, QuantizationConfig
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.fields import mapping
from quire.executor.weights.quantization.formats.by_name import NAMES, canonical, read_format
from quire.executor.weights.quantization.formats.gguf import Gguf
from quire.executor.weights.quantization.online import ONLINE, Online
from quire.executor.weights.quantization.per_layer import PerLayer
from quire.executor.weights.quantization.scheme import LinearScheme
from quire.executor.weights.quantization.unquantized import Unquantized

OF_EXPERTS = "mxfp4"
"""A format that only experts have. A family that knows it reads them itself, and its linear layers are plain."""

OF_GGUF = "gguf"
"""The formats of GGUF files, which may differ from layer to layer."""

CONFIG_FIELDS = ("quantization_config", "compression_config")
"""The fields of config.json that name a checkpoint's format."""

_ALIASES = {
    **dict.fromkeys(("int8_per_channel_weight_only", "experts_int8", "int8_per_channel_static"), "int8"),
    **dict.fromkeys(("fp8_per_channel", "fp8_per_channel_static"), "fp8"),
    "fp8_per_tensor_static": "fp8_per_tensor",
    "fp8_per_block_static": "fp8_per_block",
}
_SEVERAL = {"moe_wna16": ("gptq", "awq"), "mxfp8": ("fp8", "modelopt")}
"""Names that checkpoints of several formats have."""

_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""The files in which tools stored a format's settings before config.json had them, and the tools."""


def choose_scheme(spec: ModelSpec, quantization: Quantization | None) -> LinearScheme:
    """Returns the checkpoint's own scheme, or else the user's; the model's dtype if there is neither.

    Raises:
        ModelLoadError: the checkpoint is quantized in a way that is not read, or `quantization` names another one.
    """
    method, config = own_config(spec)
    if method is None or (method == OF_EXPERTS and quantization not in (None, OF_EXPERTS)):
        return _made_at_load(spec, quantization)
    if isinstance(quantization, QuantizationConfig):
        raise ModelLoadError(
            f"{spec.name} is quantized ({method}), and --quantization-config is for weights of 16 or 32 bits: leave "
            "the option out, or take the unquantized checkpoint."
        )
    if method == OF_GGUF:
        if quantization not in (None, OF_GGUF):
            raise ModelLoadError(f"{spec.name} is quantized as its GGUF file is: drop --quantization {quantization}.")
        return Gguf.of(spec)
    if method not in NAMES:
        raise ModelLoadError(
            f"{spec.name} is quantized ({method}), which is not read; {', '.join(NAMES)} are. Of an unquantized "
            f"checkpoint, --quantization {' or '.join(ONLINE)} makes the weights smaller."
        )
    if quantization is not None and method not in _SEVERAL.get(quantization, (canonical(quantization),)):
        raise ModelLoadError(
            f"{spec.name} is quantized ({method}), and --quantization {quantization} names something else: leave the "
            "option out, or take the unquantized checkpoint."
        )
    if method == OF_EXPERTS:
        return Unquantized()
    return read_format(method, config, getattr(torch, spec.dtype))


def of_towers(scheme: LinearScheme) -> LinearScheme:
    """Returns the scheme of a model's towers: that of the checkpoint. Nothing is quantized at load there."""
    return Unquantized() if isinstance(scheme, Online | PerLayer) else scheme


def is_gguf(spec: ModelSpec) -> bool:
    """Returns True if the tensors are in GGUF files, where llama.cpp's converter splits or transposes some."""
    return own_config(spec)[0] == OF_GGUF


def own_config(spec: ModelSpec) -> tuple[str | None, Mapping[str, Any]]:
    """Returns (the name of the checkpoint's format, or None; its configuration)."""
    for field in CONFIG_FIELDS:
        config = mapping(spec.hf_config, field)
        if config:
            method = config.get("quant_method") or _method_of(config, field)
            return canonical(str(method)), config
    for name, method in _FILES.items():
        path = Path(spec.path) / name
        if path.is_file():
            return method, _read_file(path)
    return None, {}


def _method_of(config: Mapping[str, Any], field: str) -> str:
    """Recognizes the format of a config that does not name it."""
    if field == "compression_config" or "config_groups" in config or "sparsity_config" in config:
        return "compressed-tensors"
    if "quant_algo" in config:
        return "modelopt"
    return "unknown"


def _read_file(path: Path) -> Mapping[str, Any]:
    config = checkpoint_file.read_json(path)
    try:
        return config.get("quantization", config)
    except AttributeError as error:
        raise ModelLoadError(f"{path} is no JSON object ({error}). Download it again.") from None


def _made_at_load(spec: ModelSpec, quantization: Quantization | None) -> LinearScheme:
    if quantization is None:
        return Unquantized()
    if isinstance(quantization, QuantizationConfig):
        return _per_layer(quantization)
    if _ALIASES.get(quantization, quantization) not in ONLINE:
        raise ModelLoadError(
            f"{spec.name} is not quantized, and --quantization {quantization} names a format of checkpoints: leave the "
            f"option out, or make the weights smaller with {' or '.join(ONLINE)}."
        )
    return _online(quantization)


def _per_layer(config: QuantizationConfig) -> PerLayer:
    formats = functools.cache(_online)  # layers of one format are counted together
    linear, experts = (formats(each if isinstance(each, str) else None) for each in (config.linear, config.moe))
    rules = {**dict.fromkeys(config.ignore), **(config.targets or {})}
    return PerLayer(linear, experts, {name: formats(each) for name, each in rules.items()})


def _online(name: str | None) -> Online | Unquantized:
    """Builds the scheme that quantizes at load; None: no quantization. It collects the names of one model's layers."""
    if name is None:
        return Unquantized()
    return dataclasses.replace(ONLINE[_ALIASES.get(name, name)], unquantized=set())

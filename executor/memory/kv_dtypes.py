"""Chooses the dtype of each layer's keys and values in the cache."""

import functools
from collections.abc import Sequence

import torch

from quire.core.config.cache import KVCacheDtype
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.weights.quantization.cache_scheme import checkpoint_cache_dtype
from quire.ops.cache_rows import LARGEST_CODE

logger = get_logger(__name__)

_CODES: dict[KVCacheDtype, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_inc": torch.float8_e4m3fn,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int8_per_token_head": torch.int8,
    "int4": torch.uint8,
    "int4_per_token_head": torch.uint8,
}
"""The dtypes of `quire.ops.cache_rows`, by their names for users."""

_WINDOWS = "sliding_window"


def layer_dtypes(engine: EngineConfig, layers: Sequence[AttentionKV]) -> list[torch.dtype]:
    """Returns the dtype of each of `layers`: the user's choice, else the checkpoint's; the model's for skipped layers.

    Layers that support no quantized cache have the model's dtype, too.

    Raises:
        ModelLoadError: there is no such layer to skip.
    """
    config, model_dtype = engine.cache, getattr(torch, engine.spec.dtype)
    name, skipped = config.kv_cache_dtype, set[int]()
    if name == "auto" and (own := checkpoint_cache_dtype(engine.spec)) is not None:
        name = own
        _log_once(own)
    chosen = model_dtype if name == "auto" else _CODES.get(name) or getattr(torch, name)
    if chosen in LARGEST_CODE:
        skipped |= {number for number, layer in enumerate(layers) if not layer.can_be_quantized}
    skipped |= {_layer_number(each, len(layers)) for each in config.kv_cache_dtype_skip_layers if each != _WINDOWS}
    if _WINDOWS in config.kv_cache_dtype_skip_layers:
        skipped |= {number for number, layer in enumerate(layers) if layer.window is not None}
    return [model_dtype if number in skipped else chosen for number in range(len(layers))]


@functools.cache
def _log_once(name: KVCacheDtype) -> None:
    """Logs the checkpoint's choice, once in a process, which plans its cache more than once."""
    logger.info("the KV cache has the type of the checkpoint's config, %s; --kv-cache-dtype chooses another type", name)


def _layer_number(text: str, num_layers: int) -> int:
    if text.isdecimal() and int(text) < num_layers:
        return int(text)
    raise ModelLoadError(
        f"--kv-cache-dtype-skip-layers {text}: give the number of a layer with keys and values, 0 to {num_layers - 1}, "
        f"or {_WINDOWS}."
    )

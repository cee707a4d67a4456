"""The type in which each layer's keys and values are kept."""

from collections.abc import Sequence

import torch

from quire.core.config.cache import CacheConfig, KVCacheDtype
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import AttentionKV

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
"""The types that `quire.ops.cache_rows` knows, by their names for users."""

_WINDOWS = "sliding_window"


def layer_dtypes(config: CacheConfig, layers: Sequence[AttentionKV], model_dtype: torch.dtype) -> list[torch.dtype]:
    """The type of each of `layers`: what the user chose, or `model_dtype` for those that are to be skipped.

    Raises:
        ModelLoadError: there is no such layer to skip.
    """
    name = config.kv_cache_dtype
    chosen = model_dtype if name == "auto" else _CODES.get(name) or getattr(torch, name)
    skipped = {_layer_number(each, len(layers)) for each in config.kv_cache_dtype_skip_layers if each != _WINDOWS}
    if _WINDOWS in config.kv_cache_dtype_skip_layers:
        skipped |= {number for number, layer in enumerate(layers) if layer.window is not None}
    return [model_dtype if number in skipped else chosen for number in range(len(layers))]


def _layer_number(text: str, num_layers: int) -> int:
    if text.isdecimal() and int(text) < num_layers:
        return int(text)
    raise ModelLoadError(
        f"--kv-cache-dtype-skip-layers {text}: give the number of a layer with keys and values, 0 to {num_layers - 1}, "
        f"or {_WINDOWS}."
    )

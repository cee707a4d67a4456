"""The KV cache's type, and the calibrated scales of keys and values, of a quantized checkpoint."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.config.cache import KVCacheDtype
from quire.core.config.resolved import EngineConfig, ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.schemes import OF_GGUF, own_config
from quire.executor.weights.readers import Stored, TensorSource

_TYPES: dict[tuple[str, int], KVCacheDtype] = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
"""The cache's type by kind of number and bits."""

_CALIBRATED: dict[KVCacheDtype, KVCacheDtype] = {
    "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_inc": "fp8_e4m3", "int8": "int8"
}  # fmt: skip
"""The types that take a checkpoint's scales, by their names for users. `..._per_token_head` computes its own."""

_NAMES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "qkv_proj.{}_scale", "{}_proj.output_scale", "kv_scale")
"""The tensors in an attention layer, as written by compressed-tensors in vLLM's names, by ModelOpt, by ModelOpt for
fused layers, by Quark, and by files from before keys and values had separate scales.
"""

_REMEDY = "--calculate-kv-scales takes the scales of each token and head instead."


def checkpoint_cache_dtype(spec: ModelSpec) -> KVCacheDtype | None:
    """The type for `--kv-cache-dtype auto`; None: the checkpoint names none, or one that the cache does not support.

    compressed-tensors and ModelOpt name it in `kv_cache_scheme`, older files in `kv_cache_quant_algo`.
    Quark's `kv_cache_quant_config` chooses nothing, as in vLLM.
    """
    method, config = own_config(spec)
    if method not in ("compressed-tensors", "modelopt"):
        return None
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return _TYPES.get((str(scheme.get("type")), scheme.get("num_bits", 0)))
    return "fp8_e4m3" if str(scheme).upper() == "FP8" else None


class CacheScales(NamedTuple):
    """How a model's layers get the checkpoint's scales of their keys and values.

    Attributes:
        dtype: the quantized type that the scales are for.
        are_used: the cache has this type, and the user does not have scales calculated. If False, the scales are looked
            up nevertheless: packed files answer only the questions that were asked when they were written, and a later
            start may use the scales.
    """

    dtype: KVCacheDtype
    are_used: bool

    @classmethod
    def of(cls, config: EngineConfig) -> "CacheScales | None":
        """Chooses by the options and the checkpoint; None: its format has no such scales."""
        method, _ = own_config(config.spec)
        if method is None or method == OF_GGUF:
            return None
        own, name = checkpoint_cache_dtype(config.spec), config.cache.kv_cache_dtype
        dtype = own or "fp8_e4m3"  # where no type is named, scales are those of FP8
        is_kept = own is not None if name == "auto" else _CALIBRATED.get(name) == dtype
        return cls(dtype, is_kept and not config.cache.calculate_kv_scales)

    def read(self, source: TensorSource, layer: str, num_heads: int, heads: range) -> Tensor | None:
        """The scales [2, len(heads)] float32 of a layer's keys and values; None: not used, or there are none.

        Args:
            layer: the name of the attention layer.
            num_heads: KV heads of the whole layer.
            heads: those of this rank.

        Raises:
            ModelLoadError: the scales are not positive, or neither of the layer nor of its heads.
        """
        names = [self._find(source, layer, kind) for kind in "kv"]
        if any(name is None for name in names):
            return None
        parts = [self._read(source, *name, num_heads, heads) for name in names if name is not None]
        return torch.cat(parts).view(2, len(heads)) if self.are_used else None

    def _find(self, source: TensorSource, layer: str, kind: str) -> tuple[str, Stored] | None:
        for form in _NAMES:
            name = f"{layer}.{form.format(kind, kind)}"
            if (found := source.find(name)) is not None:
                return name, found
        return None

    def _read(self, source: TensorSource, name: str, stored: Stored, num_heads: int, heads: range) -> Tensor:
        scales = source.read(name, stored.shape, None, torch.float32).reshape(-1)
        if not self.are_used:
            return scales
        if len(scales) not in (1, num_heads):
            raise ModelLoadError(f"{name} has the shape {stored.shape}, not one scale or {num_heads}. {_REMEDY}")
        own = scales.expand(len(heads)) if len(scales) == 1 else scales[heads.start : heads.stop]
        if not own.is_meta and not bool(((own > 0) & (own < torch.inf)).all()):
            raise ModelLoadError(f"{name} holds a scale that is not positive and finite. {_REMEDY}")
        return own

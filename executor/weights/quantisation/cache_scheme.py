"""The type of cached keys and values that a quantised checkpoint asks for."""

from collections.abc import Mapping

from quire.core.config.cache import KVCacheDtype
from quire.core.config.resolved import ModelSpec
from quire.executor.weights.quantisation.schemes import own_config

_TYPES: dict[tuple[str, int], KVCacheDtype] = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
"""By kind of number and bits."""


def checkpoint_cache_dtype(spec: ModelSpec) -> KVCacheDtype | None:
    """The type for `--kv-cache-dtype auto`; None: the checkpoint names none, or one that is not kept.

    compressed-tensors and ModelOpt name it in `kv_cache_scheme`, older files of ModelOpt in `kv_cache_quant_algo`, as
    may the first. Quark's `kv_cache_quant_config` chooses nothing in vLLM either.
    """
    method, config = own_config(spec)
    if method not in ("compressed-tensors", "modelopt"):
        return None
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return _TYPES.get((str(scheme.get("type")), scheme.get("num_bits", 0)))
    return "fp8_e4m3" if str(scheme).upper() == "FP8" else None

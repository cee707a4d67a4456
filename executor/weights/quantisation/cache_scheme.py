"""The type of cached keys and values that a quantised checkpoint asks for."""

from quire.core.config.cache import KVCacheDtype
from quire.core.config.resolved import ModelSpec
from quire.executor.weights.quantisation.schemes import own_config

_TYPES: dict[tuple[str, int], KVCacheDtype] = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
"""By kind of number and bits."""


def checkpoint_cache_dtype(spec: ModelSpec) -> KVCacheDtype | None:
    """The type for `--kv-cache-dtype auto`; None: the checkpoint names none, or one that is not kept.

    compressed-tensors and ModelOpt name it in `kv_cache_scheme`, older files of ModelOpt in `kv_cache_quant_algo`.
    Quark's `kv_cache_quant_config` chooses nothing in vLLM either.
    """
    method, config = own_config(spec)
    if method not in ("compressed-tensors", "modelopt"):
        return None
    if str(config.get("kv_cache_quant_algo")).upper() == "FP8":
        return "fp8_e4m3"
    scheme = config.get("kv_cache_scheme") or {}
    return _TYPES.get((scheme.get("type", ""), scheme.get("num_bits", 0)))

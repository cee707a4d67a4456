"""The CPU backend: oneDNN linear layers with prepacked weights; everything else in plain torch."""

from quire.ops.cpu.linear import linear, pack_linear
from quire.ops.cpu.memory import keep_freed_memory
from quire.ops.eager import (
    add_rms_norm,
    attention,
    attention_batch,
    embedding,
    kv_cache_shape,
    rms_norm,
    rotary,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "add_rms_norm",
    "attention",
    "attention_batch",
    "embedding",
    "keep_freed_memory",
    "kv_cache_shape",
    "linear",
    "pack_linear",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv",
]

"""The operations in plain torch, right on every device; other backends take from here what they do not make faster."""

from quire.ops.eager.attention import attention, kv_cache_shape, rotate_and_store, write_kv
from quire.ops.eager.attention_plan import AttentionPlan, attention_batch
from quire.ops.eager.elementwise import add_rms_norm, rms_norm, rotary, rotation, silu_and_mul, take_rows
from quire.ops.eager.linear import gated_linear, linear, pack_gated_linear, pack_linear
from quire.ops.eager.recording import record
from quire.ops.eager.sampling import apply_bitmask, draw, likeliest

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "apply_bitmask",
    "attention",
    "attention_batch",
    "draw",
    "gated_linear",
    "kv_cache_shape",
    "likeliest",
    "linear",
    "pack_gated_linear",
    "pack_linear",
    "record",
    "rms_norm",
    "rotary",
    "rotate_and_store",
    "rotation",
    "silu_and_mul",
    "take_rows",
    "write_kv",
]

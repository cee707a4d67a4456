"""The CPU backend: C++ kernels that are built on the machine, and oneDNN for linear layers that they do not cover.

This module is the backend without those kernels, in plain torch; `bind` chooses.
"""

from quire.ops.cpu.compiler import load_kernels
from quire.ops.cpu.linear import gated_linear, linear, pack_gated_linear, pack_linear
from quire.ops.cpu.memory import keep_freed_memory, return_freed_memory
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager import (
    add_rms_norm,
    apply_bitmask,
    attention,
    attention_batch,
    draw,
    kv_cache_shape,
    likeliest,
    record,
    rms_norm,
    rotary,
    rotate_and_store,
    rotation,
    silu_and_mul,
    take_rows,
    write_kv,
)

__all__ = [
    "NativeBackend",
    "add_rms_norm",
    "apply_bitmask",
    "attention",
    "attention_batch",
    "draw",
    "gated_linear",
    "keep_freed_memory",
    "kv_cache_shape",
    "likeliest",
    "linear",
    "load_kernels",
    "pack_gated_linear",
    "pack_linear",
    "record",
    "return_freed_memory",
    "rms_norm",
    "rotary",
    "rotate_and_store",
    "rotation",
    "silu_and_mul",
    "take_rows",
    "write_kv",
]

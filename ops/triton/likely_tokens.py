"""Rows of logits without their unlikely tokens: top-k, top-p and min-p, without a sort.

A program reads its row several times, from the second level of cache. Between two numbers, one known to be too small
for the least value that stays, it tries three at a time, until one value is left.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.host_arrays import to_device
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import UNIT, VECTOR, are_aligned, are_whole
from quire.ops.triton.variants import Variant

_TILE = 2048
_NUM_WARPS = 16


@Kernel
def keep_min_p_rows(logits_ptr, log_min_p_ptr, size, stride, TILE: tl.constexpr):
    """`size` and `stride` count vectors, here and below; a row's logits are float32, and changed in place.

    A value that drops nothing costs no look at the row.
    """
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * (stride * UNIT)
    log_min_p = tl.load(log_min_p_ptr + tl.program_id(0))
    if log_min_p > float("-inf"):
        most = tl.max(_most_of_lanes(row_ptr, size * UNIT, TILE), 0)
        _drop_below(row_ptr, size * UNIT, most + log_min_p, 0.0, 0.0, False, TILE)


@Kernel
def keep_top_k_rows(logits_ptr, top_k_ptr, size, stride, TILE: tl.constexpr):
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * (stride * UNIT)
    top_k = tl.load(top_k_ptr + tl.program_id(0))
    if top_k < size * UNIT:
        least = _least_kept(row_ptr, size * UNIT, top_k, 0.0, 0.0, False, TILE)
        _drop_below(row_ptr, size * UNIT, least, 0.0, 0.0, False, TILE)


@Kernel
def keep_top_p_rows(logits_ptr, top_p_ptr, size, stride, TILE: tl.constexpr):
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * (stride * UNIT)
    size = size * UNIT
    top_p = tl.load(top_p_ptr + tl.program_id(0))
    if top_p < 1:
        most = tl.max(_most_of_lanes(row_ptr, size, TILE), 0)
        totals = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, size, TILE, num_stages=5):
            totals += tl.exp(_logits(row_ptr, start, size, TILE) - most)
        share = 1 / tl.sum(totals, 0)
        least = _least_kept(row_ptr, size, top_p, most, share, True, TILE)
        _drop_below(row_ptr, size, least, most, share, True, TILE)


@triton.jit
def _logits(row_ptr, start, size, TILE: tl.constexpr):
    columns = start + tl.arange(0, TILE)
    return tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))


@triton.jit
def _most_of_lanes(row_ptr, size, TILE: tl.constexpr):
    most = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, size, TILE, num_stages=5):
        most = tl.maximum(most, _logits(row_ptr, start, size, TILE))
    return most


@triton.jit
def _value(x, most, share, IS_PROB: tl.constexpr):
    """What tokens are compared by: the logit, or the probability."""
    return tl.exp(x - most) * share if IS_PROB else x


@triton.jit
def _drop_below(row_ptr, size, least, most, share, IS_PROB: tl.constexpr, TILE: tl.constexpr):
    """Drops numbers whose value is less. Infinity and NaN stay, so that the row is seen to be unusable."""
    for start in tl.range(0, size, TILE, num_stages=5):
        columns = start + tl.arange(0, TILE)
        x = _logits(row_ptr, start, size, TILE)
        stays = (_value(x, most, share, IS_PROB) >= least) | (x != x) | (x == float("inf"))
        tl.store(row_ptr + columns, tl.where(stays, x, float("-inf")), mask=columns < size)


@triton.jit
def _key(value):
    """A whole number that is ordered as the float32 is."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least_kept(row_ptr, size, target, most, share, IS_PROB: tl.constexpr, TILE: tl.constexpr):
    """The least value such that those greater than it weigh less than `target`. A value weighs 1, or itself."""
    infinite = 2139095040  # the key of infinity
    low = tl.full([], -infinite - 1, tl.int64)  # the greater ones weigh too much: that of -inf
    high = tl.full([], infinite, tl.int64)
    kind: tl.constexpr = tl.float64 if IS_PROB else tl.int32
    while high - low > 1:
        step = (high - low) // 4
        first, second, third = low + step, low + (high - low) // 2, high - step
        above_first = tl.zeros([TILE], kind)
        above_second = tl.zeros([TILE], kind)
        above_third = tl.zeros([TILE], kind)
        greatest = tl.full([TILE], -2147483648, tl.int32)
        least = tl.full([TILE], 2147483647, tl.int32)
        low_key, high_key = low.to(tl.int32), high.to(tl.int32)
        first_key, second_key, third_key = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        for start in tl.range(0, size, TILE, num_stages=5):
            x = _logits(row_ptr, start, size, TILE)
            value = _value(x, most, share, IS_PROB)
            key = _key(value)
            weight = value.to(kind) if IS_PROB else tl.full([TILE], 1, kind)
            nothing = tl.zeros([TILE], kind)
            above_first += tl.where(key > first_key, weight, nothing)
            above_second += tl.where(key > second_key, weight, nothing)
            above_third += tl.where(key > third_key, weight, nothing)
            is_inside = (key > low_key) & (key <= high_key)
            greatest = tl.maximum(greatest, tl.where(is_inside, key, -2147483648))
            least = tl.minimum(least, tl.where(is_inside, key, 2147483647))
        top, bottom = tl.max(greatest, 0).to(tl.int64), tl.min(least, 0).to(tl.int64)
        if tl.sum(above_first, 0) < target:
            high = first
        elif tl.sum(above_second, 0) < target:
            low, high = first, second
        elif tl.sum(above_third, 0) < target:
            low, high = second, third
        else:
            low = third
        # The least that stays is a value of the row: no other number need be tried.
        high = tl.minimum(high, top)
        low = tl.maximum(low, bottom - 1)
        if top <= bottom:  # one value is left, or none
            high, low = bottom, bottom - 1
    bits = high.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def keep(kernel: Kernel, logits: Tensor, values: np.ndarray) -> bool:
    """Launches a kernel on `logits`, with a value for each row. False, and nothing is written, if it takes them not."""
    is_covered = logits.dtype == torch.float32 and logits.stride(1) == 1 and len(logits) > 0
    if not is_covered or not are_whole(logits.shape[1], logits.stride(0)) or not are_aligned(logits):
        return False
    launch(kernel, logits, to_device(values, logits.device))
    return True


def launch(kernel: Kernel, logits: Tensor, values: Tensor) -> None:
    """Launches a kernel on `logits`, with values that are on the device."""
    sizes = logits.shape[1] // VECTOR, logits.stride(0) // VECTOR
    kernel((len(logits),), logits, values, *sizes, TILE=_TILE, num_warps=_NUM_WARPS)


def variants() -> list[Variant]:
    """All that a server may launch."""
    of_kernels = {keep_min_p_rows: "*fp32", keep_top_k_rows: "*i64", keep_top_p_rows: "*fp64"}
    types = {"logits_ptr": "*fp32", "size": "i32", "stride": "i32"}
    return [
        Variant(
            kernel,
            {**types, kernel.parameters[1]: value},
            {"TILE": _TILE},
            _NUM_WARPS,
            3,
            "a program a processor: a vector a thread, 4 tiles ahead",
        )
        for kernel, value in of_kernels.items()
    ]

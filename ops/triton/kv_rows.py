"""Rows of a KV cache in kernels: their codes and scales, as `quire.ops.cache_rows` says.

A cache is passed as its memory: of its own dtype to be read, of uint8 to be written if it is quantized. `KIND` names
the rows: "plain", "int8", "e4m3", "e5m2", or "int4" for two codes a byte.
"""

import torch
import triton
import triton.language as tl

from quire.ops.cache_rows import LARGEST, SCALE_BYTES, row_size

KINDS = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
PLAIN_KINDS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
PAGE_ALIGNMENT = 16
"""Elements to whose multiples the stride from page to page is aligned."""

_LARGEST = tl.constexpr(LARGEST)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: numbers beside it are integers


def has_kernels(kv_cache: torch.Tensor, head_dim: int) -> bool:
    """Returns True if kernels read and write this cache: rows are aligned, and pages lie where wide loads start."""
    dtype, (block_size, row) = kv_cache.dtype, kv_cache.shape[3:]
    return (
        (dtype in PLAIN_KINDS or dtype in KINDS)
        and head_dim % 8 == 0
        and block_size & (block_size - 1) == 0
        and row == row_size(head_dim, dtype)
        and kv_cache.stride()[1:] == torch.empty(kv_cache.shape[1:], device="meta").stride()
        and kv_cache.stride(0) % PAGE_ALIGNMENT == 0
        and kv_cache.data_ptr() % PAGE_ALIGNMENT == 0
    )


def page_shift(kv_cache: torch.Tensor) -> int:
    """The binary logarithm of a page's tokens: kernels do not divide by it."""
    return kv_cache.shape[3].bit_length() - 1


def kind_of(dtype: torch.dtype) -> str:
    """Names the rows of a cache of `dtype` for the kernels' constant `KIND`."""
    return KINDS.get(dtype, "plain")


@triton.jit
def load_rows(base_ptr, offsets, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, dtype):
    """Loads the rows at `offsets` [N] as their codes [N, BLOCK_D] of `dtype`, and the scales [N] float32.

    Rows that are not `seen`, and columns past HEAD_DIM, are zeros.
    """
    if KIND == "int4":
        columns = tl.arange(0, BLOCK_D // 2)
        mask = seen[:, None] & (columns < HEAD_DIM // 2)[None, :]
        pairs = tl.load(base_ptr + offsets[:, None] + columns[None, :], mask=mask, other=0)
        low = (pairs << 4).to(tl.int8, bitcast=True) >> 4
        codes = tl.interleave(low, pairs.to(tl.int8, bitcast=True) >> 4).to(dtype)
        scales = _load_scales(base_ptr, offsets + HEAD_DIM // 2, seen)
    else:
        columns = tl.arange(0, BLOCK_D)
        places = base_ptr + offsets[:, None] + columns[None, :]
        if HEAD_DIM == BLOCK_D:
            codes = tl.load(places, mask=seen[:, None], other=0.0)
        else:
            codes = tl.load(places, mask=seen[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
        if KIND == "plain":
            codes = codes.to(dtype)
            scales = tl.full(offsets.shape, 1.0, tl.float32)
        else:
            codes = codes.to(tl.float32).to(dtype)
            scales = _load_scales(base_ptr, offsets + HEAD_DIM, seen)
    return codes, scales


@triton.jit
def _load_scales(base_ptr, offsets, seen):
    return tl.load((base_ptr + offsets).to(tl.pointer_type(tl.float32), bitcast=True), mask=seen, other=0.0)


@triton.jit
def store_rows(
    base_ptr,
    offsets,
    x,
    mask,
    fixed_scales,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    HAS_FIXED: tl.constexpr,
):
    """Stores `x` [N, BLOCK_D] float32 in the rows at `offsets` [N], as finite values.

    `x` is 0 past HEAD_DIM. With HAS_FIXED, the rows have the scales `fixed_scales` [N].
    """
    columns = tl.arange(0, BLOCK_D)
    places = offsets[:, None] + columns[None, :]
    stored = mask[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.where(x == x, x, 0.0)
    if KIND == "plain":
        # A cache may be of a narrower dtype than the values.
        most = 65504.0 if base_ptr.dtype.element_ty == tl.float16 else _LARGEST
        tl.store(base_ptr + places, _limited(x, most).to(base_ptr.dtype.element_ty), mask=stored)
    else:
        most_code = 448.0 if KIND == "e4m3" else 57344.0 if KIND == "e5m2" else 127.0 if KIND == "int8" else 7.0
        x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
        if HAS_FIXED:
            scales = fixed_scales
            values = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
            values = tl.minimum(tl.maximum(values, -most_code), most_code)
        else:
            most = tl.max(tl.abs(x), axis=1)
            is_empty = most < 1e-30
            scales = tl.where(is_empty, 0.0, tl.div_rn(most, tl.full(most.shape, most_code, tl.float32)))
            inverse = tl.div_rn(tl.full(most.shape, most_code, tl.float32), tl.where(is_empty, 1.0, most))
            values = x * tl.where(is_empty, 0.0, inverse)[:, None]
        if KIND == "e4m3":
            codes = _float8(values, MANTISSA=3, BIAS=7)
        elif KIND == "e5m2":
            codes = _float8(values, MANTISSA=2, BIAS=15)
        else:
            codes = ((values + _ROUNDER) - _ROUNDER).to(tl.int32)
        if KIND == "int4":
            low, high = tl.split(tl.reshape(codes, (x.shape[0], BLOCK_D // 2, 2)))
            pairs = tl.arange(0, BLOCK_D // 2)
            places = offsets[:, None] + pairs[None, :]
            stored = mask[:, None] & (pairs < HEAD_DIM // 2)[None, :]
            codes = (low & 15) | ((high & 15) << 4)
        size: tl.constexpr = HEAD_DIM // 2 if KIND == "int4" else HEAD_DIM
        tl.store(base_ptr + places, (codes & 255).to(tl.uint8), mask=stored)
        places_of_scales = (base_ptr + offsets + size).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(places_of_scales, scales, mask=mask)


@triton.jit
def _limited(x, most):
    """Replaces infinities by `most`, and what float16 can not hold."""
    return tl.minimum(tl.maximum(x, -most), most)


@triton.jit
def _float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Rounds `x` float32, within the range, to the nearest 8-bit float, and returns its bits as int32.

    In integers, because compilers and processors differ in their casts to eight bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Beside 1.5 * 2**23 quanta, a float32's last bit is one quantum of the subnormal numbers.
    rounder: tl.constexpr = 12582912.0 * 2.0 ** (1 - BIAS - MANTISSA)
    small = (magnitude.to(tl.float32, bitcast=True) + rounder).to(tl.int32, bitcast=True) & 255
    is_small = magnitude < ((128 - BIAS) << 23)
    return tl.where(is_small, small, normal) | ((bits >> 24) & 128)

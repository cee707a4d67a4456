"""Rows of a KV cache in kernels: their codes and scales, as `quire.ops.cache_rows` says.

A quantized cache is passed as bytes, because not all cards know all types of codes. `KIND` names the rows: "plain",
"int4" for two codes a byte, or as in `codes.py`. A page of heads has its scales where
`quire.ops.cache_pages.ScalePlanes` puts them; in a page of latents, a scale follows its codes.
"""

import torch
import triton
import triton.language as tl

from quire.ops.cache_rows import LARGEST, SCALE_BYTES, row_size
from quire.ops.triton.codes import values_of

KINDS = {
    torch.uint8: "int4",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
QUANTIZED_FORMS = (
    *((dtype, False) for dtype in KINDS),
    *((dtype, True) for dtype in (torch.int8, torch.float8_e4m3fn)),
)
"""The types of quantized caches, and whether a checkpoint gives their heads' scales."""
PLAIN_KINDS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 512
"""Of heads that are stored, and read in decode steps; see `quire.ops.triton.attention` for prompts."""
PAGE_ALIGNMENT = 16
"""Elements to whose multiples the stride from page to page is aligned."""

_LARGEST = tl.constexpr(LARGEST)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_PAGE_ALIGNMENT = tl.constexpr(PAGE_ALIGNMENT)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: numbers beside it are integers


def has_kernels(kv_cache: torch.Tensor, head_dim: int) -> bool:
    """Returns True if kernels read and write this cache: rows are aligned, and pages lie where wide loads start."""
    dtype, (block_size, row) = kv_cache.dtype, kv_cache.shape[3:]
    return (
        (dtype in PLAIN_KINDS or dtype in KINDS)
        and head_dim % 8 == 0
        and block_size & (block_size - 1) == 0
        and row == row_size(head_dim, dtype)
        and (dtype in PLAIN_KINDS or block_size * row % PAGE_ALIGNMENT == 0)
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
def head_begin(head, page_shift, ROW: tl.constexpr, KIND: tl.constexpr):
    """The place of a head in its page, in elements. The heads of values follow those of keys."""
    begin = (head << page_shift) * ROW
    if KIND != "plain":  # rows of codes and a scale are no whole loads, but pages of them are
        begin = tl.multiple_of(begin, _PAGE_ALIGNMENT)
    return begin


@triton.jit
def row_places(head_begins, offsets, page_shift, ROW: tl.constexpr, KIND: tl.constexpr):
    """The places of rows, and of their scales, `offsets` rows behind the beginnings of their heads."""
    if KIND == "plain":
        places = head_begins + offsets * ROW
        scale_places = places
    else:
        size: tl.constexpr = ROW - _SCALE_BYTES
        places = head_begins + offsets * size
        scale_places = head_begins + (1 << page_shift) * size + offsets * _SCALE_BYTES
    return places, scale_places


@triton.jit
def scales_behind(places, SIZE: tl.constexpr, KIND: tl.constexpr):
    """The places of scales that follow the codes of their rows of SIZE values."""
    return places + (SIZE // 2 if KIND == "int4" else SIZE)


@triton.jit
def load_rows(
    base_ptr,
    offsets,
    scale_offsets,
    seen,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    dtype,
):
    """Loads the rows at `offsets` [N] as their codes [N, BLOCK_D] of `dtype`, and the scales [N] float32.

    Rows that are not `seen`, and columns past HEAD_DIM, are zeros.
    """
    if KIND == "int4":
        pairs = tl.arange(0, BLOCK_D // 2)
        mask = seen[:, None] & (pairs < HEAD_DIM // 2)[None, :]
        codes = tl.load(base_ptr + offsets[:, None] + pairs[None, :], mask=mask, other=0).to(tl.int32)
        values = tl.interleave(_signed(codes & 15), _signed(codes >> 4))
    else:
        columns = tl.arange(0, BLOCK_D)
        places = base_ptr + offsets[:, None] + columns[None, :]
        if HEAD_DIM == BLOCK_D:
            values = tl.load(places, mask=seen[:, None], other=0)
        else:
            values = tl.load(places, mask=seen[:, None] & (columns < HEAD_DIM)[None, :], other=0)
        if KIND != "plain":
            values = values_of(values.to(tl.int32), 0, 0.0, KIND)
    if KIND == "plain":
        scales = tl.full(offsets.shape, 1.0, tl.float32)
    else:
        places_of_scales = (base_ptr + scale_offsets).to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(places_of_scales, mask=seen, other=0.0)
    return values.to(dtype), scales


@triton.jit
def _signed(codes):
    """The values of codes of four bits in two's complement, float32."""
    return values_of(codes, 8, 8388608.0 + 8, "line")


@triton.jit
def store_rows(
    base_ptr,
    offsets,
    scale_offsets,
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
        most_code = (
            448.0 if KIND == "float8_e4m3fn" else 57344.0 if KIND == "float8_e5m2" else 127.0 if KIND == "int8" else 7.0
        )
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
        if KIND == "float8_e4m3fn":
            codes = _float8(values, MANTISSA=3, BIAS=7)
        elif KIND == "float8_e5m2":
            codes = _float8(values, MANTISSA=2, BIAS=15)
        else:
            codes = ((values + _ROUNDER) - _ROUNDER).to(tl.int32)
        if KIND == "int4":
            low, high = tl.split(tl.reshape(codes, (x.shape[0], BLOCK_D // 2, 2)))
            pairs = tl.arange(0, BLOCK_D // 2)
            places = offsets[:, None] + pairs[None, :]
            stored = mask[:, None] & (pairs < HEAD_DIM // 2)[None, :]
            codes = (low & 15) | ((high & 15) << 4)
        tl.store(base_ptr + places, (codes & 255).to(tl.uint8), mask=stored)
        places_of_scales = (base_ptr + scale_offsets).to(tl.pointer_type(tl.float32), bitcast=True)
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

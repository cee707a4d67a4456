"""Heads between projection and attention, in kernels: norms, rotation, and the places of keys and values."""

import triton
import triton.language as tl

from quire.ops.triton.kv_rows import PAGE_ALIGNMENT, head_begin, row_places

TOKEN_ALIGNMENT = 8
"""Elements to whose multiples the stride from token to token is aligned."""

_PAGE_ALIGNMENT = tl.constexpr(PAGE_ALIGNMENT)


@triton.jit
def cache_rows(slot, kv_head, page_stride, page_shift, ROW: tl.constexpr, KIND: tl.constexpr):
    """Places of a slot's rows and of their scales; values lie behind keys, so that their heads are further ones."""
    page, offset = slot >> page_shift, slot & ((1 << page_shift) - 1)
    page_stride = tl.multiple_of(page_stride.to(tl.int64), _PAGE_ALIGNMENT)
    begins = page * page_stride + head_begin(kv_head.to(tl.int64), page_shift, ROW, KIND)
    return row_places(begins, offset, page_shift, ROW, KIND)


@triton.jit
def rotated_heads(
    token_ptr,
    head,
    is_head,
    is_rotated,
    token,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Loads the heads `head` [N] of the token at `token_ptr`: [N, BLOCK_D], 0 where `is_head` [N] is False.

    Those for which `is_rotated` [N] is True are normalized, if there is a weight, and rotated.
    """
    columns = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    is_rotated = is_rotated[:, None]
    half: tl.constexpr = ROTARY_DIM // 2
    if IS_INTERLEAVED:
        own = tl.where(columns < half, 2 * columns, 2 * (columns - half) + 1)
        own = tl.where(columns < ROTARY_DIM, own, columns)
        other = tl.where(columns < half, own + 1, own - 1)[None, :]
        own = tl.where(is_rotated, own[None, :], columns[None, :])  # values keep their order
    else:
        own = columns[None, :]
        other = tl.where(columns < half, columns + half, columns - half)
        if half % 8 == 0:
            other = tl.max_contiguous(tl.multiple_of(other, 8), 8)
        other = other[None, :]
    row_ptr = token_ptr + head[:, None] * HEAD_DIM
    x = tl.load(row_ptr + own, mask=mask, other=0.0)
    turned = (columns < ROTARY_DIM)[None, :] & is_rotated & mask
    swapped = tl.load(row_ptr + other, mask=turned, other=0.0)
    plain = x
    if weight_ptr is not None:
        full = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(full * full, axis=1) / HEAD_DIM + eps)
        x = _normed(x, inverse, weight_ptr, head[:, None] * HEAD_DIM + own, mask & is_rotated)
        swapped = _normed(swapped, inverse, weight_ptr, head[:, None] * HEAD_DIM + other, turned)
    if ROTARY_DIM > 0:
        places = token * ROTARY_DIM + columns
        cos = tl.load(cos_ptr + places, mask=columns < ROTARY_DIM, other=0.0)[None, :].to(tl.float32)
        sin = tl.load(sin_ptr + places, mask=columns < ROTARY_DIM, other=0.0)[None, :].to(tl.float32)
        product = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
        x = tl.where(turned, (product + swapped.to(tl.float32) * sin).to(x.dtype), x)
    return tl.where(is_rotated, x, plain)


@triton.jit
def _normed(x, inverse, weight_ptr, places, mask):
    """`x` times each row's `inverse` and the weight, rounded where plain torch rounds."""
    weight = tl.load(weight_ptr + places, mask=mask, other=0.0)
    normed = (x.to(tl.float32) * inverse[:, None]).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(weight.dtype).to(x.dtype)

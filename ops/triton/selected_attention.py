"""Attention of each token to keys that are selected for it, and the merge of several parts of an attention."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.cache_rows import in_octets
from quire.ops.latent import Selection
from quire.ops.triton import kv_rows
from quire.ops.triton.attention import decode_tiles, has_tiles
from quire.ops.triton.attention_scores import LOG2_E, finish, scaled_values, score_tile, softmax_step
from quire.ops.triton.kv_rows import PAGE_ALIGNMENT, head_begin, load_rows, row_places
from quire.ops.triton.launch import Kernel

_PAGE_ALIGNMENT = tl.constexpr(PAGE_ALIGNMENT)
_LOG2_E = tl.constexpr(LOG2_E)
_BLOCK = 1024


def attend_selected(q: Tensor, kv_cache: Tensor, selection: Selection, scale: float) -> Tensor | None:
    """Runs `Backend.selected_attention`; None if that is left to plain torch."""
    if not has_tiles(q, kv_cache):
        return None
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, row = kv_cache.shape[2:]
    tiles = decode_tiles(num_heads // num_kv_heads, head_dim, q.dtype, kv_cache.dtype)
    q = q.contiguous()
    out = torch.empty_like(q)
    selected_attention(
        (num_kv_heads, num_tokens),
        q, in_octets(kv_cache), out, selection.slots, selection.counts,
        num_kv_heads, num_heads // num_kv_heads, selection.slots.stride(0), kv_cache.stride(0),
        kv_rows.page_shift(kv_cache), float(scale * LOG2_E),
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        ROW=row, KIND=kv_rows.kind_of(kv_cache.dtype), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Runs `Backend.merge_attention`; None for outputs of another dtype than the kernels'."""
    outs, sums = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    if outs.dtype not in kv_rows.PLAIN_KINDS:
        return None
    out = torch.empty_like(outs[0])
    merge_stacked(
        (triton.cdiv(out.numel(), _BLOCK),), out, outs, sums, out.numel(), len(parts),
        HEAD_DIM=out.shape[-1], BLOCK=_BLOCK, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


@Kernel
def selected_attention(
    q_ptr,
    cache_ptr,
    out_ptr,
    slots_ptr,
    counts_ptr,
    num_kv_heads,
    group,
    slots_stride,
    page_stride,
    page_shift,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
):
    """A program computes the query heads of one KV head of one token, over the slots of the token."""
    kv_head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * group + lanes
    places = (token * num_kv_heads * group + heads)[:, None] * HEAD_DIM + columns[None, :]
    mask = (lanes < group)[:, None] & (columns < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + places, mask=mask, other=0.0)
    page_stride = tl.multiple_of(page_stride.to(tl.int64), _PAGE_ALIGNMENT)
    values_ptr = cache_ptr + head_begin(num_kv_heads.to(tl.int64), page_shift, ROW, KIND)
    count = tl.load(counts_ptr + token).to(tl.int32)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    none = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in tl.range(0, count, BLOCK_N):
        numbers = start + tl.arange(0, BLOCK_N)
        seen = numbers < count
        slots = tl.load(slots_ptr + token * slots_stride + numbers, mask=seen, other=0)
        begins = (slots >> page_shift).to(tl.int64) * page_stride + head_begin(kv_head, page_shift, ROW, KIND)
        rows, scale_rows = row_places(begins, slots & ((1 << page_shift) - 1), page_shift, ROW, KIND)
        k, k_scales = load_rows(cache_ptr, rows, scale_rows, seen, HEAD_DIM, BLOCK_D, KIND, q.dtype)
        scores = score_tile(q, k, k_scales, none, heads, total, None, scale, 0.0, 0, KIND, False, False)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        v, v_scales = load_rows(values_ptr, rows, scale_rows, seen, HEAD_DIM, BLOCK_D, KIND, q.dtype)
        v = scaled_values(v, v_scales, KIND)
        most, total, acc = softmax_step(scores, most, total, acc, v, v_scales, KIND)
    out, _ = finish(most, total, acc, tl.full((BLOCK_M,), float("-inf"), tl.float32))
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def merge_stacked(out_ptr, outs_ptr, sums_ptr, count, num_parts, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Merges parts, in order: each has `count` numbers, and a logarithm for each HEAD_DIM of them.

    Where a part saw no key, its numbers are undefined, and are not read.
    """
    numbers = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = numbers < count
    heads = numbers // HEAD_DIM
    stride = count.to(tl.int64)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for part in range(num_parts):
        sums = tl.load(sums_ptr + part * (stride // HEAD_DIM) + heads, mask=mask, other=float("-inf"))
        most = tl.maximum(most, sums)
    base = tl.where(most == float("-inf"), 0.0, most)
    acc, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        sums = tl.load(sums_ptr + part * (stride // HEAD_DIM) + heads, mask=mask, other=float("-inf"))
        share = tl.exp2((sums - base) * _LOG2_E)
        seen = mask & (sums > float("-inf"))
        acc += share * tl.load(outs_ptr + part * stride + numbers, mask=seen, other=0.0).to(tl.float32)
        total += share
    tl.store(out_ptr + numbers, (acc / tl.where(total > 0.0, total, 1.0)).to(out_ptr.dtype.element_ty), mask=mask)

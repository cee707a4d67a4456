"""Attention of rows with several new tokens: prompts, and parts of prompts.

A program computes a block of one row's queries, for all query heads of one KV head, over all keys that they see. Of a
head with more values than registers hold, programs share the values, and each computes all scores.
"""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import (
    finish,
    key_places,
    scaled_values,
    score_tile,
    softmax_step,
    visible_range,
)
from quire.ops.triton.kv_rows import PAGE_ALIGNMENT, head_begin, load_rows
from quire.ops.triton.launch import Kernel

_PAGE_ALIGNMENT = tl.constexpr(PAGE_ALIGNMENT)


def num_blocks(num_tokens: int, num_rows: int, block_q: int) -> int:
    """Bounds the blocks of `block_q` queries of all rows, of which each begins a block."""
    return num_tokens // block_q + num_rows


@triton.jit
def find_row(starts_ptr, block, num_rows, block_q):
    """The row of a block, if row r's first block is `starts[r] // block_q + r`, which leaves room for those before."""
    low = tl.full((), 0, tl.int32)
    high = num_rows
    while low + 1 < high:
        middle = (low + high) // 2
        is_before = tl.load(starts_ptr + middle) // block_q + middle <= block
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _attend_tiles(
    most,
    total,
    acc,
    begin,
    end,
    q,
    cache_ptr,
    values_ptr,
    table_ptr,
    kv_head,
    page_stride,
    page_shift,
    positions,
    firsts,
    ends,
    least,
    limit,
    heads,
    slopes,
    bias_ptr,
    scale,
    softcap,
    reach,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds the keys from `begin` to `end`, a tile at a time. Without IS_MASKED, every query sees all of them.

    `firsts` and `ends` [M] are the keys that each query sees; `least` and `limit` those of any query.
    """
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        in_range = (keys >= least) & (keys < limit)
        places, scale_places = key_places(
            table_ptr, keys, in_range, kv_head, page_stride, page_shift, ROW, KIND
        )  # fmt: skip
        k, k_scales = load_rows(cache_ptr, places, scale_places, in_range, HEAD_DIM, BLOCK_D, KIND, q.dtype)
        distances = keys[None, :] - positions[:, None]
        scores = score_tile(
            q, k, k_scales, distances, heads, slopes, bias_ptr, scale, softcap, reach, KIND, HAS_SOFTCAP, HAS_SLOPES
        )
        if IS_MASKED:
            is_seen = (keys[None, :] >= firsts[:, None]) & (keys[None, :] < ends[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        v, v_scales = load_rows(values_ptr, places, scale_places, in_range, VALUES, BLOCK_V, KIND, q.dtype)
        v = scaled_values(v, v_scales, KIND)
        most, total, acc = softmax_step(scores, most, total, acc, v, v_scales, KIND)
    return most, total, acc


@Kernel
def prompt_attention(
    q_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    prefix_spans_ptr,
    tables_ptr,
    sinks_ptr,
    slopes_ptr,
    bias_ptr,
    num_rows,
    num_kv_heads,
    group,
    block_q,
    table_stride,
    page_stride,
    page_shift,
    scale,
    softcap,
    window,
    span_window,
    chunk,
    reach,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """A block is `block_q` queries, times the `group` query heads of a KV head: at most BLOCK_M rows.

    The grid is (KV heads, blocks, parts of `VALUES` values): of a quantized cache, there is one part.

    Rows of one token are left to `decode_attention`.
    """
    # The last blocks of a prompt see the most keys, so they begin first.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    kv_head = tl.program_id(0)
    row = find_row(starts_ptr, block, num_rows, block_q)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    seq_len = tl.load(seq_lens_ptr + row)
    query_begin = (block - (start // block_q + row)) * block_q
    if query_len == 1 or query_begin >= query_len:
        return
    lanes = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    queries = query_begin + lanes // group
    is_query = (lanes < block_q * group) & (queries < query_len)
    # Lanes without a query stand at the last one, so that they widen no range.
    queries = tl.minimum(queries, tl.minimum(query_begin + block_q, query_len) - 1)
    heads = kv_head * group + lanes % group
    rows = (start + queries).to(tl.int64) * (num_kv_heads * group) + heads
    mask = is_query[:, None] & (columns < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)

    prefix_begin = 0
    prefix_end = 0
    if prefix_spans_ptr is not None:
        prefix_begin = tl.load(prefix_spans_ptr + 2 * row)
        prefix_end = tl.load(prefix_spans_ptr + 2 * row + 1)
    positions = tl.maximum(seq_len - query_len + queries, 0)
    firsts, ends = visible_range(positions, prefix_begin, prefix_end, window, span_window, chunk, CHUNKS)
    ends = tl.where(seq_len > 0, ends, 0)
    least, limit = tl.min(firsts), tl.max(ends)
    # Between them, every query sees every key.
    full_begin, full_end = tl.max(firsts), tl.min(ends)
    begin = least - least % BLOCK_N
    full_begin = tl.minimum((full_begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N, limit)
    full_begin = tl.maximum(full_begin, begin)
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)

    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    first_value = tl.program_id(2) * VALUES
    values_ptr = cache_ptr + head_begin(num_kv_heads.to(tl.int64), page_shift, ROW, KIND)
    if VALUES < HEAD_DIM:
        values_ptr += first_value
    page_stride = tl.multiple_of(page_stride.to(tl.int64), _PAGE_ALIGNMENT)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for part in tl.static_range(3):
        tiles_begin = begin if part == 0 else full_begin if part == 1 else full_end
        tiles_end = full_begin if part == 0 else full_end if part == 1 else limit
        most, total, acc = _attend_tiles(
            most, total, acc, tiles_begin, tiles_end, q, cache_ptr, values_ptr, table_ptr, kv_head, page_stride,
            page_shift, positions, firsts, ends, least, limit, heads, slopes, bias_ptr, scale, softcap, reach,
            HEAD_DIM, BLOCK_D, VALUES, BLOCK_V, BLOCK_N, ROW, KIND, HAS_SOFTCAP, slopes_ptr is not None, part != 1,
        )  # fmt: skip
    sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads)
    out, lse = finish(most, total, acc, sinks)
    values = tl.arange(0, BLOCK_V)
    outs = out_ptr + rows[:, None] * HEAD_DIM + first_value + values[None, :]
    tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & (values < VALUES)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, lse, mask=is_query)

"""Attention of rows with one new token each, whose work `decode_units.py` divides.

One kernel takes queries that are rotated, beside keys and values that are stored. The other takes the projections of
the new tokens, and rotates and stores them itself.
"""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import key_places, merge_parts, scaled_values, score_tile, softmax_step
from quire.ops.triton.chain import start_next, wait_for_inputs
from quire.ops.triton.decode_units import find_unit, finish_unit, list_units, row_range
from quire.ops.triton.kv_rows import PAGE_ALIGNMENT, head_begin, load_rows, store_rows
from quire.ops.triton.launch import Kernel
from quire.ops.triton.rotation import TOKEN_ALIGNMENT, cache_rows, rotated_heads

_PAGE_ALIGNMENT = tl.constexpr(PAGE_ALIGNMENT)
_TOKEN_ALIGNMENT = tl.constexpr(TOKEN_ALIGNMENT)


@Kernel
def decode_attention(
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
    parts_ptr,
    part_sums_ptr,
    counters_ptr,
    num_rows,
    num_kv_heads,
    group,
    table_stride,
    page_stride,
    page_shift,
    max_parts,
    scale,
    softcap,
    window,
    span_window,
    chunk,
    reach,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """`BLOCK_M` is at least `group`, the query heads of a KV head. The rows are those of `list_units`."""
    start_next()
    wait_for_inputs()
    has_parts, part_ends, unit_ends, num_units = list_units(
        starts_ptr, seq_lens_ptr, prefix_spans_ptr, num_rows, num_kv_heads, max_parts, window, span_window, chunk,
        BLOCK_ROWS, CHUNKS, BLOCK_N,
    )  # fmt: skip
    lanes, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_head = lanes < group
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    page_stride = tl.multiple_of(page_stride.to(tl.int64), _PAGE_ALIGNMENT)
    for item in range(tl.program_id(0), num_units * num_kv_heads, tl.num_programs(0)):
        unit, kv_head = item // num_kv_heads, item % num_kv_heads
        row, split, is_split, part_end = find_unit(unit, has_parts, part_ends, unit_ends, BLOCK_ROWS)
        seq_len = tl.load(seq_lens_ptr + row)
        prefix_begin = 0
        prefix_end = 0
        if prefix_spans_ptr is not None:
            prefix_begin = tl.load(prefix_spans_ptr + 2 * row)
            prefix_end = tl.load(prefix_spans_ptr + 2 * row + 1)
        begin, first, end, size, row_splits = row_range(
            seq_len, prefix_begin, prefix_end, window, span_window, chunk, CHUNKS, BLOCK_N
        )  # fmt: skip
        token = row
        if starts_ptr is not None:
            token = tl.load(starts_ptr + row)
        heads = kv_head * group + lanes
        q_rows = token.to(tl.int64) * num_kv_heads * group + heads
        q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
        most, total, acc = attend_splits(
            q, cache_ptr, tables_ptr + row.to(tl.int64) * table_stride, slopes_ptr, bias_ptr, seq_len, begin, first,
            end, size, split, tl.where(is_split, split + 1, row_splits), kv_head, num_kv_heads, heads, is_head,
            page_stride, page_shift, scale, softcap, reach,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ROW, KIND, HAS_SOFTCAP,
        )  # fmt: skip
        finish_unit(
            most, total, acc, q_rows, kv_head, split, part_end, row_splits, is_split, out_ptr, lse_ptr, sinks_ptr,
            parts_ptr, part_sums_ptr, counters_ptr + row * num_kv_heads + kv_head, num_kv_heads, group,
            HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip


@Kernel
def rotate_and_attend(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    weight_ptr,
    scales_ptr,
    cache_ptr,
    out_ptr,
    seq_lens_ptr,
    tables_ptr,
    sinks_ptr,
    slopes_ptr,
    bias_ptr,
    parts_ptr,
    part_sums_ptr,
    counters_ptr,
    token_stride,
    eps,
    num_rows,
    num_kv_heads,
    group,
    table_stride,
    page_stride,
    page_shift,
    max_parts,
    scale,
    softcap,
    window,
    span_window,
    chunk,
    reach,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """`rotate_and_store_heads` and `decode_attention` in one, for rows of one token each, with the bits of both.

    A program rotates the query heads of its unit. That whose unit has the row's last keys stores the new key and value
    before it reads them; no other program reads these.
    """
    start_next()
    wait_for_inputs()
    has_parts, part_ends, unit_ends, num_units = list_units(
        None, seq_lens_ptr, None, num_rows, num_kv_heads, max_parts, window, span_window, chunk,
        BLOCK_ROWS, CHUNKS, BLOCK_N,
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK_M)
    is_head = lanes < group
    page_stride = tl.multiple_of(page_stride.to(tl.int64), _PAGE_ALIGNMENT)
    token_stride = tl.multiple_of(token_stride.to(tl.int64), _TOKEN_ALIGNMENT)
    num_heads = num_kv_heads * group
    for item in range(tl.program_id(0), num_units * num_kv_heads, tl.num_programs(0)):
        unit, kv_head = item // num_kv_heads, item % num_kv_heads
        row, split, is_split, part_end = find_unit(unit, has_parts, part_ends, unit_ends, BLOCK_ROWS)
        seq_len = tl.load(seq_lens_ptr + row)
        begin, first, end, size, row_splits = row_range(seq_len, 0, 0, window, span_window, chunk, CHUNKS, BLOCK_N)
        split_end = tl.where(is_split, split + 1, row_splits)
        token_ptr = heads_ptr + row.to(tl.int64) * token_stride
        heads = kv_head * group + lanes
        q = rotated_heads(
            token_ptr, heads, is_head, is_head, row, cos_ptr, sin_ptr, weight_ptr, eps,
            HEAD_DIM, BLOCK_D, ROTARY_DIM, False,
        )  # fmt: skip
        if split_end == row_splits:
            pair = tl.arange(0, 2)  # the key and the value
            new = rotated_heads(
                token_ptr, num_heads + kv_head + pair * num_kv_heads, pair < 2, pair < 1, row, cos_ptr, sin_ptr,
                weight_ptr, eps, HEAD_DIM, BLOCK_D, ROTARY_DIM, False,
            )  # fmt: skip
            slot = tl.load(slots_ptr + row)
            stored_heads = kv_head + pair * num_kv_heads
            is_stored = stored_heads < tl.where(slot >= 0, 2 * num_kv_heads, 0)
            places, scale_places = cache_rows(slot, stored_heads, page_stride, page_shift, ROW, KIND)
            fixed = tl.full((2,), 1.0, tl.float32)
            if scales_ptr is not None:
                fixed = tl.load(scales_ptr + stored_heads)
            store_rows(
                cache_ptr, places, scale_places, new.to(tl.float32), is_stored, fixed, HEAD_DIM, BLOCK_D, KIND,
                scales_ptr is not None,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have stored before one of them reads
        most, total, acc = attend_splits(
            q, cache_ptr, tables_ptr + row.to(tl.int64) * table_stride, slopes_ptr, bias_ptr, seq_len, begin, first,
            end, size, split, split_end, kv_head, num_kv_heads, heads, is_head, page_stride, page_shift, scale,
            softcap, reach, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ROW, KIND, HAS_SOFTCAP,
        )  # fmt: skip
        finish_unit(
            most, total, acc, row.to(tl.int64) * num_heads + heads, kv_head, split, part_end, row_splits, is_split,
            out_ptr, None, sinks_ptr, parts_ptr, part_sums_ptr, counters_ptr + row * num_kv_heads + kv_head,
            num_kv_heads, group, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip


@triton.jit
def attend_splits(
    q,
    cache_ptr,
    table_ptr,
    slopes_ptr,
    bias_ptr,
    seq_len,
    begin,
    first,
    end,
    size,
    split_begin,
    split_end,
    kv_head,
    num_kv_heads,
    heads,
    is_head,
    page_stride,
    page_shift,
    scale,
    softcap,
    reach,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The maximum, the sum and the weighted values of some of a row's splits, for `q` [BLOCK_M, BLOCK_D]."""
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads, mask=is_head, other=0.0)
    bias_heads = tl.where(is_head, heads, 0)
    values_ptr = cache_ptr + head_begin(num_kv_heads.to(tl.int64), page_shift, ROW, KIND)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(split_begin, split_end):
        own_most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        own_total = tl.zeros((BLOCK_M,), tl.float32)
        own_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        tile_begin = begin + split * size
        for start in tl.range(tile_begin, tl.minimum(tile_begin + size, end), BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            seen = (keys >= first) & (keys < end)
            places, scale_places = key_places(
                table_ptr, keys, seen, kv_head, page_stride, page_shift, ROW, KIND
            )  # fmt: skip
            k, k_scales = load_rows(cache_ptr, places, scale_places, seen, HEAD_DIM, BLOCK_D, KIND, q.dtype)
            distances = tl.broadcast_to((keys - (seq_len - 1))[None, :], (BLOCK_M, BLOCK_N))
            scores = score_tile(
                q, k, k_scales, distances, bias_heads, slopes, bias_ptr, scale, softcap, reach,
                KIND, HAS_SOFTCAP, slopes_ptr is not None,
            )  # fmt: skip
            scores = tl.where(seen[None, :], scores, float("-inf"))
            v, v_scales = load_rows(values_ptr, places, scale_places, seen, HEAD_DIM, BLOCK_D, KIND, q.dtype)
            v = scaled_values(v, v_scales, KIND)
            own_most, own_total, own_acc = softmax_step(scores, own_most, own_total, own_acc, v, v_scales, KIND)
        most, total, acc = merge_parts(most, total, acc, own_most, own_total, own_acc)
    return most, total, acc

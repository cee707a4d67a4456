"""Attention of rows with one new token each.

A sequence's keys are cut into splits, whose length depends on that sequence alone, and splits are merged in order. So a
row's bits do not depend on the other rows. A fixed number of programs walks over the splits of all rows and KV heads,
so one launch serves all lengths. Which program merges, and where parts wait for it, changes no bits: a program that
takes all splits of a row merges them as it goes; otherwise the last program to finish one of them does.
"""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import (
    finish,
    key_places,
    merge_parts,
    scaled_values,
    score_tile,
    softmax_step,
    visible_range,
)
from quire.ops.triton.chain import start_next, wait_for_inputs
from quire.ops.triton.kv_rows import PAGE_ALIGNMENT, load_rows
from quire.ops.triton.launch import Kernel

_PAGE_ALIGNMENT = tl.constexpr(PAGE_ALIGNMENT)


def split_len(length: int) -> int:
    """Keys of a split of a sequence of which `length` keys are seen.

    A split is at least 128 keys, two tiles, and its partial result at most a few percent of the bytes that it reads;
    a sequence alone has enough splits for all multiprocessors from about 4,000 keys on.
    """
    return 128 if length <= 1024 else 256 if length <= 4096 else 512 if length <= 16384 else 1024


def num_splits(length: int) -> int:
    """Bounds the splits of sequences of which at most `length` keys are seen, and tiles that begin before the first."""
    return max(-(-most // split_len(most)) for most in {min(length, step) for step in (1024, 4096, 16384, length)})


@triton.jit
def _split_len(length):
    return tl.where(length <= 1024, 128, tl.where(length <= 4096, 256, tl.where(length <= 16384, 512, 1024)))


@triton.jit
def _row_range(seq_len, prefix_len, window, chunk, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key of a row's first tile, the first that it sees, the end, and the number of splits, at least 1."""
    first, end = visible_range(tl.maximum(seq_len - 1, 0), prefix_len, window, chunk, CHUNKS)
    end = tl.where(seq_len > 0, tl.maximum(end, 0), 0)
    first = tl.minimum(first, end)
    begin = first - first % BLOCK_N
    length = end - begin
    size = _split_len(length)
    return begin, first, end, size, tl.maximum((length + size - 1) // size, 1)


@Kernel
def decode_attention(
    q_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
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
    """Work is counted in units: a unit is one split of a row, or all of them. `max_parts` bounds the splits that wait.

    `BLOCK_ROWS` is at least `num_rows`, `BLOCK_M` at least `group`, the query heads of a KV head. Without `starts_ptr`,
    each row has one token; with it, rows that have another number are left out.
    """
    start_next()
    wait_for_inputs()
    row_ids = tl.arange(0, BLOCK_ROWS)
    is_row = row_ids < num_rows
    all_lens = tl.load(seq_lens_ptr + row_ids, mask=is_row, other=0)
    all_prefixes = tl.zeros((BLOCK_ROWS,), tl.int32)
    if prefix_lens_ptr is not None:
        all_prefixes = tl.load(prefix_lens_ptr + row_ids, mask=is_row, other=0)
    _, _, _, _, splits = _row_range(all_lens, all_prefixes, window, chunk, CHUNKS, BLOCK_N)
    if starts_ptr is not None:
        begins = tl.load(starts_ptr + row_ids, mask=is_row, other=0)
        is_row &= tl.load(starts_ptr + row_ids + 1, mask=is_row, other=0) - begins == 1
    splits = tl.where(is_row, splits, 0)
    # A row that is at most two programs' share of the work, as half of them are resident, is one unit. It leaves no
    # parts to merge.
    is_whole = tl.num_programs(0) * splits.to(tl.int64) <= 2 * num_kv_heads * tl.sum(splits).to(tl.int64)
    parts = tl.where(is_whole | (splits == 1), 0, splits)
    part_ends = tl.cumsum(parts, 0)
    has_parts = (parts > 0) & (part_ends <= max_parts)
    units = tl.where(has_parts, splits, tl.minimum(splits, 1))
    unit_ends = tl.cumsum(units, 0)
    num_units = tl.sum(units)

    lanes = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    is_head = lanes < group
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    page_stride = tl.multiple_of(page_stride.to(tl.int64), _PAGE_ALIGNMENT)
    for item in range(tl.program_id(0), num_units * num_kv_heads, tl.num_programs(0)):
        unit, kv_head = item // num_kv_heads, item % num_kv_heads
        row = tl.sum((unit_ends <= unit).to(tl.int32))
        unit_begin = tl.max(tl.where(unit_ends <= unit, unit_ends, 0))
        is_split = tl.sum(tl.where(row_ids == row, has_parts.to(tl.int32), 0)) > 0
        part_end = tl.sum(tl.where(row_ids == row, part_ends, 0))
        seq_len = tl.load(seq_lens_ptr + row)
        prefix_len = 0
        if prefix_lens_ptr is not None:
            prefix_len = tl.load(prefix_lens_ptr + row)
        begin, first, end, size, row_splits = _row_range(seq_len, prefix_len, window, chunk, CHUNKS, BLOCK_N)
        split_begin = tl.where(is_split, unit - unit_begin, 0)
        split_end = tl.where(is_split, split_begin + 1, row_splits)

        heads = kv_head * group + lanes
        token = row
        if starts_ptr is not None:
            token = tl.load(starts_ptr + row)
        q_rows = token.to(tl.int64) * num_kv_heads * group + heads
        q_places = q_rows[:, None] * HEAD_DIM + columns[None, :]
        q = tl.load(q_ptr + q_places, mask=mask, other=0.0)
        slopes = tl.zeros((BLOCK_M,), tl.float32)
        if slopes_ptr is not None:
            slopes = tl.load(slopes_ptr + heads, mask=is_head, other=0.0)
        bias_heads = tl.where(is_head, heads, 0)
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        values_ptr = cache_ptr + (num_kv_heads << page_shift).to(tl.int64) * ROW

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
                places = key_places(table_ptr, keys, seen, kv_head, page_stride, page_shift, ROW)
                k, k_scales = load_rows(cache_ptr, places, seen, HEAD_DIM, BLOCK_D, KIND, q.dtype)
                distances = tl.broadcast_to((keys - (seq_len - 1))[None, :], (BLOCK_M, BLOCK_N))
                scores = score_tile(
                    q, k, k_scales, distances, bias_heads, slopes, bias_ptr, scale, softcap, reach,
                    KIND, HAS_SOFTCAP, slopes_ptr is not None,
                )  # fmt: skip
                scores = tl.where(seen[None, :], scores, float("-inf"))
                v, v_scales = load_rows(values_ptr, places, seen, HEAD_DIM, BLOCK_D, KIND, q.dtype)
                v = scaled_values(v, v_scales, KIND)
                own_most, own_total, own_acc = softmax_step(scores, own_most, own_total, own_acc, v, v_scales, KIND)
            most, total, acc = merge_parts(most, total, acc, own_most, own_total, own_acc)

        is_done = tl.full((), 1, tl.int32)
        if is_split:
            # [waiting split, KV head, query head]
            part_begin = part_end - row_splits
            part = (((part_begin + split_begin) * num_kv_heads + kv_head) * group + lanes).to(tl.int64)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
            tl.store(part_sums_ptr + 2 * part, most, mask=is_head)
            tl.store(part_sums_ptr + 2 * part + 1, total, mask=is_head)
            counter_ptr = counters_ptr + row * num_kv_heads + kv_head
            tl.debug_barrier()  # all threads have stored before one of them counts
            arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
            is_done = (arrived == row_splits - 1).to(tl.int32)
            if is_done != 0:
                tl.store(counter_ptr, 0)  # for the next launch
                most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                for split in range(row_splits):
                    part = (((part_begin + split) * num_kv_heads + kv_head) * group + lanes).to(tl.int64)
                    part_acc = tl.load(
                        parts_ptr + part[:, None] * HEAD_DIM + columns[None, :],
                        mask=mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    part_most = tl.load(
                        part_sums_ptr + 2 * part, mask=is_head, other=float("-inf"), cache_modifier=".cg"
                    )
                    part_total = tl.load(part_sums_ptr + 2 * part + 1, mask=is_head, other=0.0, cache_modifier=".cg")
                    most, total, acc = merge_parts(most, total, acc, part_most, part_total, part_acc)
        if is_done != 0:
            sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            if sinks_ptr is not None:
                sinks = tl.load(sinks_ptr + heads, mask=is_head, other=float("-inf"))
            out, lse = finish(most, total, acc, sinks)
            tl.store(out_ptr + q_places, out.to(out_ptr.dtype.element_ty), mask=mask)
            if lse_ptr is not None:
                tl.store(lse_ptr + q_rows, lse, mask=is_head)

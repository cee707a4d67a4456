"""Units of decode attention's work. A unit is one split of a row, or all splits of a row.

A sequence's keys are cut into splits, whose length depends on that sequence alone, and splits are merged in order. So a
row's bits do not depend on the other rows. A fixed number of programs walks over the units of all rows and KV heads, so
one launch serves all lengths. Which program merges, and where parts wait for it, changes no bits: a program that takes
all splits of a row merges them as it goes; otherwise the last program to finish one of them does.
"""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import finish, merge_parts, visible_range

MAX_PART_BYTES = 64 << 20
"""The most memory of splits that wait to be merged; rows beyond it are not split, which changes no bits."""


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
def row_range(
    seq_len, prefix_begin, prefix_end, window, span_window, chunk, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The first key of a row's first tile, the first that it sees, the end, keys of a split, and splits, at least 1."""
    last = tl.maximum(seq_len - 1, 0)
    first, end = visible_range(last, prefix_begin, prefix_end, window, span_window, chunk, CHUNKS)
    end = tl.where(seq_len > 0, tl.maximum(end, 0), 0)
    first = tl.minimum(first, end)
    begin = first - first % BLOCK_N
    length = end - begin
    size = _split_len(length)
    return begin, first, end, size, tl.maximum((length + size - 1) // size, 1)


@triton.jit
def list_units(
    starts_ptr,
    seq_lens_ptr,
    prefix_spans_ptr,
    num_rows,
    num_kv_heads,
    max_parts,
    window,
    span_window,
    chunk,
    BLOCK_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The rows whose splits wait to be merged, the ends of their places and of the rows' units, and the units.

    `max_parts` bounds the splits that wait; `BLOCK_ROWS` is at least `num_rows`. Without `starts_ptr`, each row has one
    token; with it, rows that have another number are left out.
    """
    row_ids = tl.arange(0, BLOCK_ROWS)
    is_row = row_ids < num_rows
    seq_lens = tl.load(seq_lens_ptr + row_ids, mask=is_row, other=0)
    prefix_begins = tl.zeros((BLOCK_ROWS,), tl.int32)
    prefix_ends = tl.zeros((BLOCK_ROWS,), tl.int32)
    if prefix_spans_ptr is not None:
        prefix_begins = tl.load(prefix_spans_ptr + 2 * row_ids, mask=is_row, other=0)
        prefix_ends = tl.load(prefix_spans_ptr + 2 * row_ids + 1, mask=is_row, other=0)
    _, _, _, _, splits = row_range(
        seq_lens, prefix_begins, prefix_ends, window, span_window, chunk, CHUNKS, BLOCK_N
    )  # fmt: skip
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
    return has_parts, part_ends, tl.cumsum(units, 0), tl.sum(units)


@triton.jit
def find_unit(unit, has_parts, part_ends, unit_ends, BLOCK_ROWS: tl.constexpr):
    """A unit's row, its place among the row's units, whether the row's splits wait, and the end of their places."""
    row_ids = tl.arange(0, BLOCK_ROWS)
    row = tl.sum((unit_ends <= unit).to(tl.int32))
    unit_begin = tl.max(tl.where(unit_ends <= unit, unit_ends, 0))
    is_split = tl.sum(tl.where(row_ids == row, has_parts.to(tl.int32), 0)) > 0
    return row, unit - unit_begin, is_split, tl.sum(tl.where(row_ids == row, part_ends, 0))


@triton.jit
def finish_unit(
    most,
    total,
    acc,
    q_rows,
    kv_head,
    split,
    part_end,
    row_splits,
    is_split,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    parts_ptr,
    part_sums_ptr,
    counter_ptr,
    num_kv_heads,
    group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores the outputs of a row's query heads, or of one split, unless it is the last of them to be finished.

    `q_rows` [BLOCK_M] int64 are the heads' places in the outputs; `split` is the unit's first one.
    """
    lanes, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_head = lanes < group
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    is_done = tl.full((), 1, tl.int32)
    if is_split:
        # [waiting split, KV head, query head]
        part_begin = part_end - row_splits
        part = (((part_begin + split) * num_kv_heads + kv_head) * group + lanes).to(tl.int64)
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
        tl.store(part_sums_ptr + 2 * part, most, mask=is_head)
        tl.store(part_sums_ptr + 2 * part + 1, total, mask=is_head)
        tl.debug_barrier()  # all threads have stored before one of them counts
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        is_done = (arrived == row_splits - 1).to(tl.int32)
        if is_done != 0:
            tl.store(counter_ptr, 0)  # for the next launch
            most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for other in range(row_splits):
                part = (((part_begin + other) * num_kv_heads + kv_head) * group + lanes).to(tl.int64)
                places = parts_ptr + part[:, None] * HEAD_DIM + columns[None, :]
                part_acc = tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
                part_most = tl.load(part_sums_ptr + 2 * part, mask=is_head, other=float("-inf"), cache_modifier=".cg")
                part_total = tl.load(part_sums_ptr + 2 * part + 1, mask=is_head, other=0.0, cache_modifier=".cg")
                most, total, acc = merge_parts(most, total, acc, part_most, part_total, part_acc)
    if is_done != 0:
        sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + kv_head * group + lanes, mask=is_head, other=float("-inf"))
        out, lse = finish(most, total, acc, sinks)
        out_places = out_ptr + q_rows[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_places, out.to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + q_rows, lse, mask=is_head)

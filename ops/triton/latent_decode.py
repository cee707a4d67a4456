"""Latent attention of rows with one new token each: all heads read the same keys, and a key's latent is its value, too.

Work is divided as that of `decode_attention.py`: tiles of query heads stand for KV heads.
"""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import NO_WINDOW, merge_parts
from quire.ops.triton.chain import start_next, wait_for_inputs
from quire.ops.triton.decode_units import find_unit, finish_unit, list_units, row_range
from quire.ops.triton.latent_keys import add_latents, load_queries
from quire.ops.triton.launch import Kernel

_NO_WINDOW = tl.constexpr(NO_WINDOW)


@Kernel
def decode_latents(
    q_ptr,
    q_rotated_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    tables_ptr,
    parts_ptr,
    part_sums_ptr,
    counters_ptr,
    num_rows,
    num_tiles,
    group,
    q_stride,
    q_head_stride,
    table_stride,
    page_stride,
    token_stride,
    page_shift,
    max_parts,
    scale,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROTATED_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`group` heads are a tile. A row's rotated key begins at its element `ROTATED_AT`. `q_stride` and `q_head_stride`
    lead from token to token and from head to head; strides of the cache count `UNIT` elements.
    Without `starts_ptr`, each row has one token; with it, rows that have another number are left out.
    """
    start_next()
    wait_for_inputs()
    has_parts, part_ends, unit_ends, num_units = list_units(
        starts_ptr, seq_lens_ptr, None, num_rows, num_tiles, max_parts, _NO_WINDOW, _NO_WINDOW, 0,
        BLOCK_ROWS, "none", BLOCK_N,
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK_M)
    is_head = lanes < group
    page_stride = page_stride.to(tl.int64) * UNIT
    token_stride = token_stride * UNIT
    for item in range(tl.program_id(0), num_units * num_tiles, tl.num_programs(0)):
        unit, tile = item // num_tiles, item % num_tiles
        row, split, is_split, part_end = find_unit(unit, has_parts, part_ends, unit_ends, BLOCK_ROWS)
        begin, _, end, size, row_splits = row_range(
            tl.load(seq_lens_ptr + row), 0, 0, _NO_WINDOW, _NO_WINDOW, 0, "none", BLOCK_N
        )
        token = row
        if starts_ptr is not None:
            token = tl.load(starts_ptr + row)
        heads = tile * group + lanes
        q_rows = token.to(tl.int64) * (num_tiles * group) + heads
        q_places = token.to(tl.int64) * q_stride + heads.to(tl.int64) * q_head_stride
        q, q_rotated = load_queries(
            q_ptr, q_rotated_ptr, q_places, q_rows, is_head, RANK, BLOCK_R, ROTARY_DIM, BLOCK_P
        )  # fmt: skip
        most, total, acc = attend_latents(
            q, q_rotated, cache_ptr, tables_ptr + row.to(tl.int64) * table_stride, begin, end, size, split,
            tl.where(is_split, split + 1, row_splits), page_stride, token_stride, page_shift, scale,
            RANK, BLOCK_R, ROTARY_DIM, BLOCK_P, ROTATED_AT, BLOCK_M, BLOCK_N, KIND,
        )  # fmt: skip
        finish_unit(
            most, total, acc, q_rows, tile, split, part_end, row_splits, is_split, out_ptr, lse_ptr, None,
            parts_ptr, part_sums_ptr, counters_ptr + row * num_tiles + tile, num_tiles, group,
            RANK, BLOCK_R, BLOCK_M,
        )  # fmt: skip


@triton.jit
def attend_latents(
    q,
    q_rotated,
    cache_ptr,
    table_ptr,
    begin,
    end,
    size,
    split_begin,
    split_end,
    page_stride,
    token_stride,
    page_shift,
    scale,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROTATED_AT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
):
    """The maximum, the sum and the weighted latents of some of a row's splits, for `q` [BLOCK_M, BLOCK_R]."""
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for split in range(split_begin, split_end):
        own_most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        own_total = tl.zeros((BLOCK_M,), tl.float32)
        own_acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        first = begin + split * size
        for start in tl.range(first, tl.minimum(first + size, end), BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            seen = keys < end
            pages = tl.load(table_ptr + (keys >> page_shift), mask=seen, other=0).to(tl.int64)
            places = pages * page_stride + (keys & ((1 << page_shift) - 1)) * token_stride
            own_most, own_total, own_acc = add_latents(
                own_most, own_total, own_acc, q, q_rotated, cache_ptr, places, seen, seen[None, :], scale,
                RANK, BLOCK_R, ROTARY_DIM, BLOCK_P, ROTATED_AT, KIND,
            )  # fmt: skip
        most, total, acc = merge_parts(most, total, acc, own_most, own_total, own_acc)
    return most, total, acc

"""Latent attention of rows with several new tokens, and of tokens to keys that are selected for them."""

import triton
import triton.language as tl

from quire.ops.triton.attention_scores import finish
from quire.ops.triton.latent_keys import add_latents, load_queries
from quire.ops.triton.launch import Kernel
from quire.ops.triton.prompt_attention import find_row


@Kernel
def prompt_latents(
    q_ptr,
    q_rotated_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    seq_lens_ptr,
    tables_ptr,
    num_rows,
    num_tiles,
    group,
    block_q,
    q_stride,
    q_head_stride,
    table_stride,
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
    UNIT: tl.constexpr,
):
    """A program has `block_q` tokens of a row, and a tile of `group` heads of each; arguments as `decode_latents`.

    Rows of one token are left to `decode_latents`.
    """
    # The last tokens of a prompt see the most keys, so they begin first.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    tile = tl.program_id(0)
    row = find_row(starts_ptr, block, num_rows, block_q)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    seq_len = tl.load(seq_lens_ptr + row)
    query_begin = (block - (start // block_q + row)) * block_q
    if query_len == 1 or query_begin >= query_len:
        return
    lanes = tl.arange(0, BLOCK_M)
    queries = query_begin + lanes // group
    is_query = (lanes < block_q * group) & (queries < query_len)
    # Lanes without a query stand at the last one, so that they widen no range.
    queries = tl.minimum(queries, tl.minimum(query_begin + block_q, query_len) - 1)
    heads = (tile * group + lanes % group).to(tl.int64)
    tokens = (start + queries).to(tl.int64)
    rows = tokens * (num_tiles * group) + heads
    q, q_rotated = load_queries(
        q_ptr, q_rotated_ptr, tokens * q_stride + heads * q_head_stride, rows, is_query,
        RANK, BLOCK_R, ROTARY_DIM, BLOCK_P,
    )  # fmt: skip
    ends = tl.maximum(seq_len - query_len + queries + 1, 0)
    limit = tl.max(ends)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    page_stride = page_stride.to(tl.int64) * UNIT
    token_stride = token_stride * UNIT
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for begin in tl.range(0, limit, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        is_key = keys < limit
        pages = tl.load(table_ptr + (keys >> page_shift), mask=is_key, other=0).to(tl.int64)
        places = pages * page_stride + (keys & ((1 << page_shift) - 1)) * token_stride
        most, total, acc = add_latents(
            most, total, acc, q, q_rotated, cache_ptr, places, is_key, keys[None, :] < ends[:, None], scale,
            RANK, BLOCK_R, ROTARY_DIM, BLOCK_P, ROTATED_AT, KIND,
        )  # fmt: skip
    _store(most, total, acc, rows, is_query, out_ptr, lse_ptr, RANK, BLOCK_R, BLOCK_M)


@Kernel
def selected_latents(
    q_ptr,
    q_rotated_ptr,
    cache_ptr,
    out_ptr,
    slots_ptr,
    counts_ptr,
    num_tiles,
    group,
    q_stride,
    q_head_stride,
    slots_stride,
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
    UNIT: tl.constexpr,
):
    """A program has a tile of `group` heads of one token, over the slots of the token."""
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, BLOCK_M)
    is_head = lanes < group
    heads = (tile * group + lanes).to(tl.int64)
    rows = token * (num_tiles * group) + heads
    q, q_rotated = load_queries(
        q_ptr, q_rotated_ptr, token * q_stride + heads * q_head_stride, rows, is_head,
        RANK, BLOCK_R, ROTARY_DIM, BLOCK_P,
    )  # fmt: skip
    page_stride = page_stride.to(tl.int64) * UNIT
    token_stride = token_stride * UNIT
    count = tl.load(counts_ptr + token).to(tl.int32)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for begin in tl.range(0, count, BLOCK_N):
        numbers = begin + tl.arange(0, BLOCK_N)
        is_key = numbers < count
        slots = tl.load(slots_ptr + token * slots_stride + numbers, mask=is_key, other=0)
        places = (slots >> page_shift).to(tl.int64) * page_stride + (slots & ((1 << page_shift) - 1)) * token_stride
        most, total, acc = add_latents(
            most, total, acc, q, q_rotated, cache_ptr, places, is_key, is_key[None, :], scale,
            RANK, BLOCK_R, ROTARY_DIM, BLOCK_P, ROTATED_AT, KIND,
        )  # fmt: skip
    _store(most, total, acc, rows, is_head, out_ptr, None, RANK, BLOCK_R, BLOCK_M)


@triton.jit
def _store(
    most,
    total,
    acc,
    rows,
    is_query,
    out_ptr,
    lse_ptr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores the outputs of queries, and the logarithms of their denominators."""
    out, lse = finish(most, total, acc, tl.full((BLOCK_M,), float("-inf"), tl.float32))
    latent = tl.arange(0, BLOCK_R)
    mask = is_query[:, None] & (latent < RANK)[None, :]
    tl.store(out_ptr + rows[:, None] * RANK + latent[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, lse, mask=is_query)

"""The scores by which sparse attention selects tokens, for rows with one new token each."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.cache_rows import in_octets
from quire.ops.triton import kv_rows
from quire.ops.triton.kv_rows import load_rows, scales_behind
from quire.ops.triton.launch import Kernel
from quire.ops.triton.rows import PagedRows
from quire.ops.triton.tiles import USUAL, VECTOR
from quire.ops.triton.variants import Variant

_BLOCK_N = 128
_MOST_HEADS = 64
_MOST_SIZE = 256


@Kernel
def score_tokens(
    q_ptr,
    weights_ptr,
    cache_ptr,
    out_ptr,
    seq_lens_ptr,
    tables_ptr,
    num_heads,
    num_columns,
    table_stride,
    page_stride,
    token_stride,
    page_shift,
    scale,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Sums over heads of `weight * relu(scale * q·key)`, for a tile of a row's keys; -inf for keys that it has not.

    Strides of the cache count `UNIT` elements.
    """
    row = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    seq_len = tl.load(seq_lens_ptr + row)
    seen = keys < seq_len
    scores = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    if tl.program_id(1) * BLOCK_N < seq_len:
        heads, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        is_head = heads < num_heads
        q_mask = is_head[:, None] & (columns < SIZE)[None, :]
        q = tl.load(q_ptr + (row * num_heads + heads)[:, None] * SIZE + columns[None, :], mask=q_mask, other=0.0)
        weights = tl.load(weights_ptr + row * num_heads + heads, mask=is_head, other=0.0).to(tl.float32)
        pages = tl.load(tables_ptr + row * table_stride + (keys >> page_shift), mask=seen, other=0).to(tl.int64)
        offsets = (keys & ((1 << page_shift) - 1)) * (token_stride * UNIT)
        places = pages * (page_stride.to(tl.int64) * UNIT) + offsets
        k, k_scales = load_rows(
            cache_ptr, places, scales_behind(places, SIZE, KIND), seen, SIZE, BLOCK_D, KIND, q.dtype
        )  # fmt: skip
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if KIND != "plain":
            products *= k_scales[None, :]
        products = tl.maximum(products * scale, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[:, None]
        sums = tl.sum(products, axis=0)
        scores = tl.where(seen & (sums == sums), sums, float("-inf"))
    tl.store(out_ptr + row * num_columns + keys, scores, mask=keys < num_columns)


def score(q: Tensor, weights: Tensor, cache: Tensor, rows: PagedRows, scale: float) -> Tensor | None:
    """Returns scores [num_rows, rows.max_seq_len] float32; None for what is left to plain torch."""
    if not _covers(q, cache, rows):
        return None
    num_rows, num_heads, size = q.shape
    num_columns, unit = rows.max_seq_len, _unit(cache)
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=q.device)
    score_tokens(
        (num_rows, triton.cdiv(num_columns, _BLOCK_N)),
        q.contiguous(), weights.contiguous(), in_octets(cache), out, rows.seq_lens, rows.block_tables,
        num_heads, num_columns, rows.block_tables.stride(0), cache.stride(0) // unit, cache.stride(1) // unit,
        cache.shape[1].bit_length() - 1, float(scale),
        SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(size)), BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        BLOCK_N=_BLOCK_N, KIND=kv_rows.kind_of(cache.dtype), UNIT=unit, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


def best_slots(scores: Tensor, rows: PagedRows, top_k: int) -> Tensor:
    """Returns slots [num_rows, top_k] int32 of the highest scores, by position; past a row's tokens, its own."""
    num_columns, size = scores.shape[1], rows.block_size
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    hidden = torch.arange(best.shape[1], device=best.device) >= rows.seq_lens.unsqueeze(1)
    best = best.masked_fill(hidden, num_columns).sort(dim=-1).values
    best = torch.where(best < num_columns, best, best[:, :1])
    slots = rows.block_tables.gather(1, best // size) * size + best % size
    return torch.cat((slots, slots[:, :1].expand(-1, top_k - best.shape[1])), dim=1).int()


def _unit(cache: Tensor) -> int:
    return VECTOR if cache.dtype in kv_rows.PLAIN_KINDS else 4


def _covers(q: Tensor, cache: Tensor, rows: PagedRows) -> bool:
    block_size, unit = cache.shape[1], _unit(cache)
    return (
        rows.max_query_len == 1
        and rows.prefix_spans is None
        and 0 < len(q) == len(rows.seq_lens)
        and q.dtype in kv_rows.PLAIN_KINDS
        and (cache.dtype in kv_rows.PLAIN_KINDS or cache.dtype in kv_rows.KINDS)
        and q.shape[1] <= _MOST_HEADS
        and q.shape[2] <= _MOST_SIZE
        and q.shape[2] % VECTOR == 0
        and block_size & (block_size - 1) == 0
        and cache.stride(2) == 1
        and cache.stride(0) % unit == cache.stride(1) % unit == 0
        and cache.data_ptr() % (unit * cache.itemsize) == 0
    )


def variants() -> Iterator[Variant]:
    """The indexer of DeepSeek V3.2 and GLM: 64 heads of 128 numbers."""
    for name in USUAL:
        constants: dict[str, object] = {
            "SIZE": 128, "BLOCK_D": 128, "BLOCK_H": 64, "BLOCK_N": _BLOCK_N, "KIND": "plain", "UNIT": VECTOR
        }  # fmt: skip
        types = {
            **dict.fromkeys(("q_ptr", "weights_ptr", "cache_ptr"), f"*{name}"),
            **dict.fromkeys(("seq_lens_ptr", "tables_ptr"), "*i32"),
            "out_ptr": "*fp32",
            "scale": "fp32",
        }
        typed = {each: types.get(each, "i32") for each in score_tokens.parameters if each not in constants}
        yield Variant(score_tokens, typed, constants, 8, 1, "64 heads score 128 keys of 256 bytes")

"""Latent attention on the device, and the choice of tokens, by kernels; some of the rest is in plain torch."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.cache_rows import in_octets, row_size
from quire.ops.eager.attention_plan import AttentionPlan
from quire.ops.eager.latent import EagerLatent
from quire.ops.latent import Selection
from quire.ops.triton import kv_rows, token_scores
from quire.ops.triton.attention import MAX_BLOCKS, MAX_DECODE_ROWS, ROW_BUCKETS, Attention, parts_that_wait
from quire.ops.triton.attention_scores import LOG2_E
from quire.ops.triton.batch import TritonBatch
from quire.ops.triton.decode_units import num_splits
from quire.ops.triton.latent_decode import decode_latents
from quire.ops.triton.latent_prompts import prompt_latents, selected_latents
from quire.ops.triton.launch import Kernel
from quire.ops.triton.prompt_attention import num_blocks
from quire.ops.triton.rows import PagedRows
from quire.ops.triton.tiles import FLOATS, USUAL, VECTOR
from quire.ops.triton.variants import Variant, types_of

_TYPES = {name: dtype for dtype, name in FLOATS.items()}
_MAX_RANK = 512
_MOST_HEADS = 32
"""Heads of a program: a thread of eight warps has 64 numbers of their weighted latents, and merges as many."""


class _Tiles(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def latent_tiles(group: int, dtype: torch.dtype) -> _Tiles:
    """Chooses the tiles for so many heads of a program.

    A tile of 64 keys of 576 numbers takes 72 kB in 16 bits. A thread of eight warps has 32 numbers of 16 heads'
    weighted latents, and 64 of 32 heads': those leave registers for 16 keys, of which more stages are under way.
    """
    block_m = max(16, triton.next_power_of_2(group))
    if dtype.itemsize == 4:
        return _Tiles(block_m, 16, 8, 1)
    return _Tiles(block_m, 64, 8, 2) if block_m == 16 else _Tiles(block_m, 16, 8, 4)


def prompt_tiles(dtype: torch.dtype) -> _Tiles:
    """Chooses the tiles of prompts: 32 pairs of a token and a head, as for 32 heads of a decode step.

    64 pairs, which a warp group's product wants, leave too few registers.
    """
    return _Tiles(16, 16, 8, 1) if dtype.itemsize == 4 else latent_tiles(_MOST_HEADS, dtype)


def heads_of_program(num_heads: int, most: int = _MOST_HEADS) -> int:
    """Returns how many query heads a program takes: as many as fit, so that all have equally many."""
    return max(count for count in range(1, most + 1) if num_heads % count == 0)


class TritonLatent(EagerLatent):
    """What no kernel takes is left to plain torch: ranks over 512, and rows that lie in no whole words."""

    def __init__(
        self,
        rms_norm: Callable[..., Tensor],
        rotary: Callable[..., Tensor],
        attention_of: Callable[[Tensor], Attention],
    ) -> None:
        """`attention_of` returns the attention on a tensor's device."""
        super().__init__(rms_norm, rotary)
        self._attention_of = attention_of

    def select_tokens(
        self, q: Tensor, weights: Tensor, cache: Tensor, batch: AttentionPlan, *, top_k: int, scale: float
    ) -> Selection:
        rows = batch.rows if isinstance(batch, TritonBatch) else None
        scores = None if rows is None else token_scores.score(q, weights, cache, rows, scale)
        if rows is None or scores is None:
            return super().select_tokens(q, weights, cache, batch, top_k=top_k, scale=scale)
        return Selection(token_scores.best_slots(scores, rows, top_k), rows.seq_lens.clamp_max(top_k).long())

    def latent_attention(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: AttentionPlan,
        *,
        scale: float,
        selection: Selection | None = None,
    ) -> Tensor:
        if selection is not None:
            out = _attend_selected(q, q_rotated, cache, selection, scale)
        else:
            out = self._attend(q, q_rotated, cache, batch, scale, None)
        if out is not None:
            return out
        return super().latent_attention(q, q_rotated, cache, batch, scale=scale, selection=selection)

    def partial_latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: AttentionPlan, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = self._attend(q, q_rotated, cache, batch, scale, lse)
        if out is not None:
            return out, lse
        return super().partial_latent_attention(q, q_rotated, cache, batch, scale=scale)

    def _attend(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: AttentionPlan, scale: float, lse: Tensor | None
    ) -> Tensor | None:
        """The output of the kernels, or None for what `_covers` does not accept."""
        if not isinstance(batch, TritonBatch) or not _covers(q, q_rotated, cache, batch.rows):
            return None
        rows, q_rotated = batch.rows, q_rotated.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        is_decode = rows.max_query_len == 1
        if not is_decode:
            _attend_prompts(q, q_rotated, cache, rows, scale, out, lse)
        if is_decode or len(rows.seq_lens) > 1 or len(q) == 1:
            self._decode(q, q_rotated, cache, rows, scale, out, lse)
        return out

    def _decode(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        rows: PagedRows,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Computes the rows of one token."""
        num_rows, (_, num_heads, rank) = len(rows.seq_lens), q.shape
        attention, group, splits = self._attention_of(q), heads_of_program(num_heads), num_splits(rows.max_seq_len)
        tiles = latent_tiles(group, q.dtype)
        max_parts = parts_that_wait(num_rows, splits, num_heads, rank)
        decode_latents(
            (min(attention.num_programs, num_rows * (num_heads // group) * splits),),
            q, q_rotated, in_octets(cache), out, lse, None if rows.max_query_len == 1 else rows.query_starts,
            rows.seq_lens, rows.block_tables, q.new_empty(max_parts * num_heads * rank, dtype=torch.float32),
            q.new_empty(max_parts * num_heads * 2, dtype=torch.float32),
            attention.counters(num_rows * (num_heads // group)),
            num_rows, num_heads // group, group, *q.stride()[:2], rows.block_tables.stride(0), *_places(cache),
            max_parts, float(scale * LOG2_E),
            **_constants(q, q_rotated, cache, tiles),
            BLOCK_ROWS=next(size for size in ROW_BUCKETS if size >= num_rows),
        )  # fmt: skip


def _attend_prompts(
    q: Tensor, q_rotated: Tensor, cache: Tensor, rows: PagedRows, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """Computes the rows of several tokens."""
    num_rows, (num_tokens, num_heads, _) = len(rows.seq_lens), q.shape
    tiles = prompt_tiles(q.dtype)
    group = heads_of_program(num_heads, tiles.block_m)
    block_q = tiles.block_m // group
    prompt_latents(
        (num_heads // group, num_blocks(num_tokens, num_rows, block_q)),
        q, q_rotated, in_octets(cache), out, lse, rows.query_starts, rows.seq_lens, rows.block_tables,
        num_rows, num_heads // group, group, block_q, *q.stride()[:2], rows.block_tables.stride(0), *_places(cache),
        float(scale * LOG2_E), **_constants(q, q_rotated, cache, tiles),
    )  # fmt: skip


def _attend_selected(
    q: Tensor, q_rotated: Tensor, cache: Tensor, selection: Selection, scale: float
) -> Tensor | None:  # fmt: skip
    """The output for keys that are selected; None if that is left to plain torch."""
    if not _is_read(q, q_rotated, cache) or not 0 < len(q) <= MAX_BLOCKS:
        return None
    out, group = torch.empty(q.shape, dtype=q.dtype, device=q.device), heads_of_program(q.shape[1])
    slots, tiles = selection.slots, latent_tiles(group, q.dtype)
    selected_latents(
        (q.shape[1] // group, len(q)),
        q, q_rotated.contiguous(), in_octets(cache), out, slots, selection.counts,
        q.shape[1] // group, group, *q.stride()[:2], slots.stride(0), *_places(cache), float(scale * LOG2_E),
        **_constants(q, q_rotated, cache, tiles),
    )  # fmt: skip
    return out


def _places(cache: Tensor) -> tuple[int, int, int]:
    """The strides of pages and tokens, in units, and the binary logarithm of a page's tokens."""
    unit = _unit(cache)
    return cache.stride(0) // unit, cache.stride(1) // unit, cache.shape[1].bit_length() - 1


def _constants(q: Tensor, q_rotated: Tensor, cache: Tensor, tiles: _Tiles) -> dict[str, Any]:
    """The kernels' constants, warps and stages."""
    rank, rotary_dim = q.shape[2], q_rotated.shape[2]
    return {
        "RANK": rank, "BLOCK_R": triton.next_power_of_2(rank), "ROTARY_DIM": rotary_dim,
        "BLOCK_P": max(16, triton.next_power_of_2(rotary_dim)), "ROTATED_AT": row_size(rank, cache.dtype),
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "KIND": kv_rows.kind_of(cache.dtype),
        "UNIT": _unit(cache), "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def _unit(cache: Tensor) -> int:
    """Elements of which strides of the cache are multiples: those of a load, or of the four bytes of a scale."""
    return VECTOR if cache.dtype in kv_rows.PLAIN_KINDS else 4


def _covers(q: Tensor, q_rotated: Tensor, cache: Tensor, rows: PagedRows) -> bool:
    return (
        _is_read(q, q_rotated, cache)
        and rows.prefix_spans is None
        and 0 < len(rows.seq_lens) <= MAX_DECODE_ROWS
        and 0 < len(q) <= MAX_BLOCKS - len(rows.seq_lens)
        and (rows.max_query_len > 1 or len(q) == len(rows.seq_lens))
    )


def _is_read(q: Tensor, q_rotated: Tensor, cache: Tensor) -> bool:
    """Returns True if kernels read these queries and this cache."""
    block_size, unit = cache.shape[1], _unit(cache)
    return (
        q.dtype in kv_rows.PLAIN_KINDS
        and (cache.dtype in kv_rows.PLAIN_KINDS or cache.dtype in kv_rows.KINDS)
        and 16 <= q.shape[2] <= _MAX_RANK
        and q_rotated.shape[2] > 0
        and q.shape[2] % VECTOR == q_rotated.shape[2] % VECTOR == 0
        and block_size & (block_size - 1) == 0
        and cache.stride(2) == q.stride(2) == 1
        and cache.stride(0) % unit == cache.stride(1) % unit == 0
        and cache.data_ptr() % (unit * cache.itemsize) == 0
    )


def variants() -> Iterator[Variant]:
    """The latents of DeepSeek V2 and V3, with 16 heads or a multiple of 32."""
    for name, group in itertools.product(USUAL, (16, 32)):
        tiles = latent_tiles(group, _TYPES[name])
        for kernel in (decode_latents, selected_latents):
            starts: tuple[dict[str, object], ...] = ({"starts_ptr": None}, {})
            for absent in starts if kernel is decode_latents else starts[1:]:
                yield _variant(kernel, name, tiles, absent)
    for name in USUAL:
        yield _variant(prompt_latents, name, prompt_tiles(_TYPES[name]), {})


def _variant(kernel: Kernel, name: str, tiles: _Tiles, absent: dict[str, object]) -> Variant:
    constants: dict[str, object] = {
        "RANK": 512, "BLOCK_R": 512, "ROTARY_DIM": 64, "BLOCK_P": 64, "ROTATED_AT": 512, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_ROWS": ROW_BUCKETS[0], "KIND": "plain", "UNIT": VECTOR, "lse_ptr": None,
    }  # fmt: skip
    constants = {key: value for key, value in (constants | absent).items() if key in kernel.parameters}
    known = dict.fromkeys(("starts_ptr", "seq_lens_ptr", "tables_ptr", "counters_ptr", "slots_ptr"), "*i32")
    known |= dict.fromkeys(("parts_ptr", "part_sums_ptr"), "*fp32") | {"counts_ptr": "*i64", "scale": "fp32"}
    reason = f"{tiles.block_m} queries read {tiles.block_n} keys of 1,152 bytes"
    types = types_of(kernel, constants, known, name)
    return Variant(kernel, types, constants, tiles.num_warps, tiles.num_stages, reason)

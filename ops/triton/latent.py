"""Latent attention on the device: decode steps and the choice of tokens by kernels, the rest in plain torch."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.cache_rows import row_size
from quire.ops.eager.attention_plan import AttentionPlan
from quire.ops.eager.latent import EagerLatent
from quire.ops.latent import Selection
from quire.ops.triton import kv_rows, token_scores
from quire.ops.triton.attention import MAX_DECODE_ROWS, ROW_BUCKETS, Attention, parts_that_wait
from quire.ops.triton.attention_scores import LOG2_E
from quire.ops.triton.batch import TritonBatch
from quire.ops.triton.decode_units import num_splits
from quire.ops.triton.latent_decode import decode_latents
from quire.ops.triton.rows import PagedRows
from quire.ops.triton.tiles import FLOATS, USUAL, VECTOR
from quire.ops.triton.variants import Variant

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


def heads_of_program(num_heads: int) -> int:
    """Returns how many query heads a program takes: as many as fit, so that all have equally many."""
    return max(count for count in range(1, _MOST_HEADS + 1) if num_heads % count == 0)


class TritonLatent(EagerLatent):
    """What no kernel takes is left to plain torch: prompts, ranks over 512, and rows that lie in no whole words."""

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
        out = None if selection is not None else self._decode(q, q_rotated, cache, batch, scale, None)
        if out is not None:
            return out
        return super().latent_attention(q, q_rotated, cache, batch, scale=scale, selection=selection)

    def partial_latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: AttentionPlan, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = self._decode(q, q_rotated, cache, batch, scale, lse)
        if out is not None:
            return out, lse
        return super().partial_latent_attention(q, q_rotated, cache, batch, scale=scale)

    def _decode(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: AttentionPlan,
        scale: float,
        lse: Tensor | None,
    ) -> Tensor | None:
        """The output of rows of one token; None for others, and for what `_covers` does not accept."""
        if not isinstance(batch, TritonBatch) or not _covers(q, q_rotated, cache, batch.rows):
            return None
        rows, (num_rows, num_heads, rank), rotary_dim = batch.rows, q.shape, q_rotated.shape[2]
        attention, out = self._attention_of(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        group, splits, unit = heads_of_program(num_heads), num_splits(rows.max_seq_len), _unit(cache)
        tiles = latent_tiles(group, q.dtype)
        max_parts = parts_that_wait(num_rows, splits, num_heads, rank)
        decode_latents(
            (min(attention.num_programs, num_rows * (num_heads // group) * splits),),
            q, q_rotated.contiguous(), cache, out, lse, rows.seq_lens, rows.block_tables,
            q.new_empty(max_parts * num_heads * rank, dtype=torch.float32),
            q.new_empty(max_parts * num_heads * 2, dtype=torch.float32),
            attention.counters(num_rows * (num_heads // group)),
            num_rows, num_heads // group, group, q.stride(0), q.stride(1), rows.block_tables.stride(0),
            cache.stride(0) // unit, cache.stride(1) // unit, cache.shape[1].bit_length() - 1, max_parts,
            float(scale * LOG2_E),
            RANK=rank, BLOCK_R=triton.next_power_of_2(rank), ROTARY_DIM=rotary_dim,
            BLOCK_P=max(16, triton.next_power_of_2(rotary_dim)), ROTATED_AT=row_size(rank, cache.dtype),
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_ROWS=next(size for size in ROW_BUCKETS if size >= num_rows), KIND=kv_rows.kind_of(cache.dtype),
            UNIT=unit, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        return out


def _unit(cache: Tensor) -> int:
    """Elements of which strides of the cache are multiples: those of a load, or of the four bytes of a scale."""
    return VECTOR if cache.dtype in kv_rows.PLAIN_KINDS else 4


def _covers(q: Tensor, q_rotated: Tensor, cache: Tensor, rows: PagedRows) -> bool:
    block_size, unit = cache.shape[1], _unit(cache)
    return (
        rows.max_query_len == 1
        and rows.prefix_spans is None
        and 0 < len(q) == len(rows.seq_lens) <= MAX_DECODE_ROWS
        and q.dtype in kv_rows.PLAIN_KINDS
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
    for name in USUAL:
        dtype = {known: dtype for dtype, known in FLOATS.items()}[name]
        for group in (16, 32):
            tiles = latent_tiles(group, dtype)
            constants: dict[str, object] = {
                "RANK": 512, "BLOCK_R": 512, "ROTARY_DIM": 64, "BLOCK_P": 64, "ROTATED_AT": 512,
                "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_ROWS": ROW_BUCKETS[0], "KIND": "plain",
                "UNIT": VECTOR, "lse_ptr": None,
            }  # fmt: skip
            types = {
                **dict.fromkeys(("q_ptr", "q_rotated_ptr", "cache_ptr", "out_ptr"), f"*{name}"),
                **dict.fromkeys(("seq_lens_ptr", "tables_ptr", "counters_ptr"), "*i32"),
                **dict.fromkeys(("parts_ptr", "part_sums_ptr"), "*fp32"),
                "scale": "fp32",
            }
            typed = {
                each: types.get(each, "i32") for each in decode_latents.parameters if each not in constants
            }  # fmt: skip
            reason = f"{tiles.block_m} heads read {tiles.block_n} keys of 1,152 bytes"
            yield Variant(decode_latents, typed, constants, tiles.num_warps, tiles.num_stages, reason)

"""The operations of latent attention with the kernels of `latent*.cpp`, `row_attention.cpp` and `selection.cpp`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.ops.cache_rows import largest_stored
from quire.ops.cpu import calls
from quire.ops.cpu.attention_plan import NativePlan
from quire.ops.cpu.calls import CACHE_DTYPES, DTYPES
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher
from quire.ops.eager.attention_plan import AttentionPlan
from quire.ops.latent import CacheRows, LatentOperations, NewLatents, Selection


class NativeLatent(LatentOperations[NativePlan]):
    """Latent attention by kernels. A token's result has the same bits in any batch."""

    def __init__(self, launcher: Launcher, eager: LatentOperations[AttentionPlan], fallbacks: Fallbacks) -> None:
        """`eager` takes the calls that the kernels do not cover."""
        self._launcher = launcher
        self._eager = eager
        self._fallbacks = fallbacks
        self._head_linear = launcher.bind(calls.HEAD_LINEAR)
        self._rotate_and_store = launcher.bind(calls.ROTATE_AND_STORE_LATENT)
        self._attention = launcher.bind(calls.LATENT_ATTENTION)
        self._store_rows = launcher.bind(calls.STORE_ROWS)
        self._select_tokens = launcher.bind(calls.SELECT_TOKENS)
        self._attend_rows = launcher.bind(calls.ATTEND_ROWS)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.stride(2) == 1 and weight.is_contiguous() and _are_numbers(x, weight) and x.dtype == weight.dtype:
            num_tokens, heads, _ = x.shape
            out = self._launcher.empty(num_tokens, heads, weight.shape[2], dtype=x.dtype)
            if not self._head_linear(
                x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_tokens, *weight.shape, x.stride(0), x.stride(1),
                DTYPES[x.dtype], torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.head_linear, x, weight)

    def rotate_and_store_latent(self, new: NewLatents) -> Tensor:
        q, latent, norm, cos, sin, cache, slot_mapping, is_interleaved = new
        weight, eps = norm
        same = q.dtype == latent.dtype == cos.dtype == sin.dtype
        dense = weight.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        if same and dense and _are_rows(q, latent, cache) and _are_numbers(q, weight) and _are_caches(cache):
            num_tokens, heads, rotary_dim = q.shape
            out = self._launcher.empty(num_tokens, heads, rotary_dim, dtype=q.dtype)
            slots = slot_mapping.contiguous()
            if not self._rotate_and_store(
                q.data_ptr(), latent.data_ptr(), weight.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
                cache.data_ptr(), slots.data_ptr(), num_tokens, heads, len(weight), rotary_dim, cos.shape[-1],
                q.stride(0), q.stride(1), latent.stride(0), cache.stride(0), cache.stride(1), cache.shape[1],
                is_interleaved, DTYPES[q.dtype], DTYPES[weight.dtype], CACHE_DTYPES[cache.dtype],
                torch.get_num_threads(), eps, largest_stored(cache.dtype),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.rotate_and_store_latent, new)

    def store_rows(self, x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        if _are_rows(x, cache) and _are_numbers(x) and _are_caches(cache):
            slots = slot_mapping.contiguous()
            if not self._store_rows(
                x.data_ptr(), cache.data_ptr(), slots.data_ptr(), *x.shape, x.stride(0), cache.stride(0),
                cache.stride(1), cache.shape[1], DTYPES[x.dtype], CACHE_DTYPES[cache.dtype], torch.get_num_threads(),
                largest_stored(cache.dtype),
            ):  # fmt: skip
                return
        self._fallbacks.run(self._eager.store_rows, x, cache, slot_mapping)

    def select_tokens(
        self, q: Tensor, weights: Tensor, cache: Tensor, batch: NativePlan, *, top_k: int, scale: float
    ) -> Selection:
        self._launcher.keep(batch)
        keys = (batch.query_lens, batch.seq_lens, batch.block_tables)
        selection = self._select(
            q, weights, cache, cache.shape[1], len(keys[0]), keys[2].shape[1], *(a.ctypes.data for a in keys),
            top_k=top_k, scale=scale,
        )  # fmt: skip
        if selection is not None:
            return selection
        return self._fallbacks.run(self._eager.select_tokens, q, weights, cache, batch, top_k=top_k, scale=scale)

    def best_rows(self, q: Tensor, weights: Tensor, rows: CacheRows, *, top_k: int, scale: float) -> Tensor:
        num_tokens, most = rows.slots.shape
        slots, counts = rows.slots.contiguous(), rows.counts.contiguous()
        selection = self._select(
            q, weights, rows.cache, 1, num_tokens, most, 0, counts.data_ptr(), slots.data_ptr(),
            top_k=min(top_k, most), scale=scale, gives_positions=True,
        )  # fmt: skip
        if selection is not None:
            return selection.slots.long()
        return self._fallbacks.run(self._eager.best_rows, q, weights, rows, top_k=top_k, scale=scale)

    def _select(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        entry_size: int,
        *keys: int,
        top_k: int,
        scale: float,
        gives_positions: bool = False,
    ) -> Selection | None:
        """Returns the kernel's selection, as positions if `gives_positions`, else as slots; None if it does not take
        the inputs.

        `keys` are (requests, table_stride, query_lens, seq_lens, block_tables) for the kernel.
        """
        if not (_are_rows(q, weights, cache) and _are_numbers(q) and _are_caches(cache) and q.dtype == weights.dtype):
            return None
        num_tokens, heads, size = q.shape
        num_requests, table_stride, *pointers = keys
        slots = self._launcher.empty(num_tokens, top_k, dtype=torch.int32)
        counts = self._launcher.empty(num_tokens, dtype=torch.int64)
        failed = self._select_tokens(
            q.data_ptr(), weights.data_ptr(), cache.data_ptr(), slots.data_ptr(), counts.data_ptr(), *pointers,
            q.stride(0), q.stride(1), weights.stride(0), num_requests, table_stride, cache.stride(0), cache.stride(1),
            cache.shape[1], entry_size, heads, size, top_k, gives_positions, DTYPES[q.dtype], CACHE_DTYPES[cache.dtype],
            torch.get_num_threads(), scale,
        )  # fmt: skip
        return None if failed else Selection(slots, counts)

    def attend_rows(self, q: Tensor, rows: Sequence[CacheRows], sinks: Tensor, *, scale: float) -> Tensor:
        caches = [each.cache for each in rows]
        same = len({cache.dtype for cache in caches}) == 1
        if same and _are_rows(q, *caches) and _are_numbers(q) and _are_caches(*caches) and sinks.is_contiguous():
            num_tokens, heads, size = q.shape
            out = self._launcher.empty(num_tokens, heads, size, dtype=q.dtype)
            dense = [(each.cache, each.slots.contiguous(), each.counts.contiguous()) for each in rows]
            parts = np.array([
                (cache.data_ptr(), slots.data_ptr(), counts.data_ptr(), slots.shape[1], cache.stride(0),
                 cache.stride(1), cache.shape[1])
                for cache, slots, counts in dense
            ])  # fmt: skip
            self._launcher.keep(parts)
            if not self._attend_rows(
                q.data_ptr(), out.data_ptr(), parts.ctypes.data, sinks.data_ptr(), len(parts), num_tokens, heads, size,
                q.stride(0), q.stride(1), DTYPES[q.dtype], CACHE_DTYPES[caches[0].dtype], torch.get_num_threads(),
                scale,
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.attend_rows, q, rows, sinks, scale=scale)

    def latent_attention(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: NativePlan,
        *,
        scale: float,
        selection: Selection | None = None,
    ) -> Tensor:
        out = self._attend(q, q_rotated, cache, batch, scale, selection, None)
        if out is not None:
            return out
        return self._fallbacks.run(
            self._eager.latent_attention, q, q_rotated, cache, batch, scale=scale, selection=selection
        )  # fmt: skip

    def partial_latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, batch: NativePlan, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        lse = self._launcher.empty(*q.shape[:2], dtype=torch.float32)
        out = self._attend(q, q_rotated, cache, batch, scale, None, lse)
        if out is not None:
            return out, lse
        return self._fallbacks.run(self._eager.partial_latent_attention, q, q_rotated, cache, batch, scale=scale)

    def _attend(
        self,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: NativePlan,
        scale: float,
        selection: Selection | None,
        lse: Tensor | None,
    ) -> Tensor | None:
        """Returns the outputs, and fills `lse` with log-sum-exps if given; None without a kernel for the inputs."""
        if not (
            _are_rows(q, q_rotated, cache) and _are_numbers(q) and _are_caches(cache) and q.dtype == q_rotated.dtype
        ):
            return None
        num_tokens, heads, rank = q.shape
        out = self._launcher.empty(num_tokens, heads, rank, dtype=q.dtype)
        num_requests, table_stride, entry_size, *pointers = self._keys(batch, cache.shape[1], selection)
        failed = self._attention(
            q.data_ptr(), q_rotated.data_ptr(), out.data_ptr(), cache.data_ptr(), *pointers,
            0 if lse is None else lse.data_ptr(), q.stride(0), q.stride(1), q_rotated.stride(0), q_rotated.stride(1),
            num_requests, table_stride, cache.stride(0), cache.stride(1), cache.shape[1], entry_size, heads, rank,
            q_rotated.shape[2], DTYPES[q.dtype], CACHE_DTYPES[cache.dtype], torch.get_num_threads(), scale,
        )  # fmt: skip
        return None if failed else out

    def _keys(self, batch: NativePlan, block_size: int, selection: Selection | None) -> tuple[int, ...]:
        """Returns (requests, table_stride, entry_size, query_lens, seq_lens, block_tables) for the kernel.

        With a selection each token is a separate request, and its table has slots instead of pages.
        """
        if selection is None:
            self._launcher.keep(batch)
            arrays = (batch.query_lens, batch.seq_lens, batch.block_tables)
            return len(batch.query_lens), batch.block_tables.shape[1], block_size, *(a.ctypes.data for a in arrays)
        num_tokens, top_k = selection.slots.shape
        return num_tokens, top_k, 1, 0, selection.counts.data_ptr(), selection.slots.data_ptr()


def _are_rows(*tensors: Tensor) -> bool:
    """Returns True if the last dimension of each is dense."""
    return all(x.stride(-1) == 1 for x in tensors)


def _are_numbers(*tensors: Tensor) -> bool:
    return all(x.dtype in DTYPES for x in tensors)


def _are_caches(*tensors: Tensor) -> bool:
    return all(x.dtype in CACHE_DTYPES for x in tensors)

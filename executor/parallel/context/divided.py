"""Attention over sequences whose keys and values are divided by position over ranks that hold the same KV heads."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.parallel.context.keys import PartialKeys, ShardView, StepKeys, block_of
from quire.executor.parallel.context.ring import AttentionPart, pass_keys, pass_queries
from quire.executor.parallel.context.rows import PartialRows, StepRows
from quire.executor.parallel.context.shard import SequenceShard
from quire.executor.parallel.context.strategy import CHUNKS, WHOLE, ContextParallel, KeptRows
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.posted_receives import MAX_BYTES
from quire.ops.backend import AttentionBatch, AttentionForm, Backend

GATHERED_BYTES = MAX_BYTES
"""The most of a rank's queries that all ranks gather. For so few, as in most decode steps, a gather takes less time
than a ring: one round trip instead of one for each rank.
"""

AttendPartly = Callable[[Tensor, AttentionForm, PartialKeys], AttentionPart]
"""Computes `Backend.partial_attention` of queries, over one rank's keys."""


def context_parallel(
    config: EngineConfig, tensor: ParallelGroup, group: ParallelGroup | None = None
) -> ContextParallel:
    """Builds the division that `config` asks for.

    Args:
        tensor: all ranks that share each layer's weights.
        group: the ranks with which this one divides positions; None: it will not compute.
    """
    layout = config.layout
    if layout.sequence == 1:
        return WHOLE
    group = group or ParallelGroup(tensor.rank % layout.context, layout.sequence)
    return DividedContext(group, layout.prefill, config.cp_kv_cache_interleave_size)


class DividedContext(ContextParallel):
    """One rank's part of the positions, and the group that has all of them.

    The group consists of `num_parts` times the ranks that compute the same tokens. These hold the same KV heads, and
    different query heads.

    Attributes:
        flag: of two options, the one that divides tokens.
        num_parts: parts into which the tokens of each step are divided, by their positions.
        num_same: ranks that compute the same tokens: neighbours in the group.
        group: the ranks that divide the positions.
        shard: this rank's part.
    """

    is_divided = True

    def __init__(self, group: ParallelGroup, num_parts: int, run: int) -> None:
        """Takes the length `run` of the runs of positions, which belong to the ranks of `group` in turn."""
        self.flag = "--prefill-context-parallel-size" if num_parts > 1 else "--decode-context-parallel-size"
        self.divides_tokens = num_parts > 1
        self.num_parts = num_parts
        self.num_same = group.size // num_parts
        self.group = group
        self.shard = SequenceShard(group.rank, group.size, run)

    def refuse(self, attention: str, model: str = "") -> None:
        name = f"{model}: " if model else ""
        raise ModelLoadError(f"{name}{self.flag} is not there for {attention}; use --tensor-parallel-size alone.")

    def check_model(self, name: str, kv_layers: Sequence[KeptRows], *, has_states: bool) -> None:
        if not kv_layers and not has_states:
            self.refuse("encoders, whose tokens see each other", name)
        for layer in kv_layers:
            if layer.indivisible is not None:
                self.refuse(layer.indivisible, name)
        if self.divides_tokens and has_states:
            self.refuse("recurrent layers, which need each token after the one before", name)

    def check(self, form: AttentionForm) -> None:
        turn = self.shard.run * self.shard.size
        limit = next((size for size in (form.window, form.chunk) if size is not None and size % turn), None)
        if limit is not None:
            raise ModelLoadError(
                f"{self.flag}: {self.shard.size} ranks have {self.shard.run} positions each in turn "
                f"(--cp-kv-cache-interleave-size), and turns of {turn} do not divide this model's windows or chunks of "
                f"{limit} tokens; choose numbers whose product does."
            )
        if form.slopes is not None and self.shard.run > 1:
            raise ModelLoadError(
                f"{self.flag} needs --cp-kv-cache-interleave-size 1 for this model: its attention depends on "
                "distances (ALiBi), and those between a rank's keys must be equal."
            )
        if form.distance_bias is not None:
            raise ModelLoadError(
                f"{self.flag} does not go with a learned bias by distance, as here; use --tensor-parallel-size alone."
            )

    def check_heads(self, num_ranks: int, num_kv_heads: int) -> None:
        copies = max(1, num_ranks // num_kv_heads)
        if copies % self.num_same:
            raise ModelLoadError(
                f"--decode-context-parallel-size {self.num_same} divides a KV head's positions over ranks that hold "
                f"it, and --tensor-parallel-size {num_ranks} puts each of {num_kv_heads} KV heads on {copies}; choose "
                f"{'a divisor of ' + str(copies) if copies > 1 else 1}."
            )

    def activation_size(self, num_heads: int, size: int, value_size: int) -> int:
        if self.num_parts == 1:  # results are computed, ordered by rank, and received
            return self.num_same * num_heads * (size + 3 * value_size)
        # One part of the tokens: two blocks of queries, three of results for others, and results from each rank. Blocks
        # of keys are smaller, or else they would not travel.
        blocks = -(-(2 * size + 3 * value_size) // self.num_parts)
        return num_heads * (blocks + self.num_same * value_size)

    def slots(self, pages: np.ndarray, offsets: np.ndarray, block_size: int, spare_page: int) -> np.ndarray:
        return self.shard.slots(pages, offsets, block_size, spare_page)

    def attention(
        self, ops: Backend, batch: StepRows, query_lens: np.ndarray, block_size: int
    ) -> tuple[list[AttentionBatch], ShardView]:
        rows = PartialRows.of_step(self.shard, batch, query_lens)
        return rows.attention(ops, batch.pages, block_size), rows.shard_view

    def longest(self, own: StepKeys, group: int) -> int | None:
        return super().longest(own, group) if own.shard_view is None else own.shard_view.longest

    def attend(
        self,
        ops: Backend,
        q: Tensor,
        pages: Tensor,
        own: StepKeys,
        group: int,
        form: AttentionForm,
        num_kv_heads: int = 1,
    ) -> Tensor:
        keys = PartialKeys.of(pages, own, group)
        if keys is None:
            return super().attend(ops, q, pages, own, group, form)

        def attend_partly(q: Tensor, form: AttentionForm, keys: PartialKeys) -> AttentionPart:
            return ops.partial_attention(q, keys.pages, keys.batch, form)

        return self._attend(ops, q, keys, form, attend_partly, q.shape[2], num_kv_heads)

    def attend_to_latents(
        self, ops: Backend, q: Tensor, q_rotated: Tensor, cache: Tensor, own: StepKeys, group: int, *, scale: float
    ) -> Tensor:
        keys = PartialKeys.of(cache, own, group)
        if keys is None:
            return super().attend_to_latents(ops, q, q_rotated, cache, own, group, scale=scale)
        rank = q.shape[2]

        def attend_partly(q: Tensor, form: AttentionForm, keys: PartialKeys) -> AttentionPart:
            return ops.latent.partial_latent_attention(
                q[..., :rank], q[..., rank:], keys.pages, keys.batch, scale=form.scale
            )

        return self._attend(ops, torch.cat((q, q_rotated), dim=-1), keys, AttentionForm(scale), attend_partly, rank)

    def attend_in_chunks(
        self, ops: Backend, queries: Sequence[Tensor], pages: Tensor, own: StepKeys, group: int, form: AttentionForm
    ) -> Tensor:
        keys = PartialKeys.of(pages, own, group)
        if keys is None:
            return super().attend_in_chunks(ops, queries, pages, own, group, form)

        def attend_partly(q: Tensor, form: AttentionForm, keys: PartialKeys) -> AttentionPart:
            own, previous, earlier = q.chunk(3, dim=-1)
            # Where no key of a token's chunk is the rank's, its last key is one of the previous chunk. The kernels
            # take that chunk for the token's own, because they count keys.
            is_behind = keys.shard_view.sees_none_of(chunks.chunk).view(-1, 1, 1)
            turned = torch.where(is_behind, previous, own), torch.where(is_behind, earlier, previous), earlier
            form = form._replace(chunk=partial.chunk)
            parts = [
                ops.partial_attention(each, keys.pages, keys.batch, form._replace(chunks=which))
                for which, each in zip(CHUNKS, turned, strict=True)
            ]
            return ops.merge_attention(parts), torch.stack([lse for _, lse in parts]).logsumexp(dim=0)

        chunks, partial, size = form, self._partial(form), queries[0].shape[2]
        q = torch.cat(tuple(queries), dim=-1)
        return self._attend(ops, q, keys, form._replace(chunk=None), attend_partly, size)

    def _attend(
        self,
        ops: Backend,
        q: Tensor,
        keys: PartialKeys,
        form: AttentionForm,
        attend_partly: AttendPartly,
        value_size: int,
        num_kv_heads: int = 1,
    ) -> Tensor:
        """Computes this rank's queries over the keys of each rank, and merges the parts in the order of ranks.

        `q` is [num_tokens, num_heads, size], and `form` is that of its heads; values have `value_size`.
        """

        def attend(q: Tensor, form: AttentionForm, keys: PartialKeys) -> AttentionPart:
            out, lse = attend_partly(q, self._partial(form), keys)
            if form.slopes is not None:
                lse = lse - form.slopes * keys.shard_view.distances().unsqueeze(1)
            return out, lse.masked_fill(keys.shard_view.sees_none_of(form.chunk).unsqueeze(1), -torch.inf)

        rounds = keys.shard_view.rounds
        if rounds is None or q.nbytes <= GATHERED_BYTES:
            return self._attend_gathered(ops, q, keys, form, attend, num_kv_heads)
        page_ids = rounds.page_ids(keys.group)
        num_bytes = q.element_size() * (q.shape[2] + value_size) + 4  # of a head's query and its part
        if len(page_ids) * keys.pages[0].nbytes <= q.shape[0] * q.shape[1] * num_bytes:
            parts = pass_keys(
                self.group,
                lambda: block_of(keys, page_ids),
                lambda rank, block: attend(q, form, rounds.of_keys(rank, block, keys)),
            )
        else:
            forms = self._forms(form)
            parts = pass_queries(
                self.group, q, lambda rank, block: attend(block, forms[rank], rounds.of_queries(rank, keys))
            )
        return self._merge(ops, parts, form)

    def _attend_gathered(
        self,
        ops: Backend,
        q: Tensor,
        keys: PartialKeys,
        form: AttentionForm,
        attend: AttendPartly,
        num_kv_heads: int,
    ) -> Tensor:
        """Implements `_attend` with one gather: each rank attends for the queries of all ranks, and sends each its
        parts.
        """
        order, back = keys.shard_view.order, keys.shard_view.back
        if order is not None:
            q = ops.take_rows(q.flatten(1), order).view(q.shape)
        gathered = form
        if form.slopes is not None and self.num_same > 1:
            slopes = self._gather(form.slopes.view(1, -1, 1), num_kv_heads)  # the same for each part
            gathered = form._replace(slopes=slopes[0, :, 0])
        made = attend(self._gather(q, num_kv_heads), gathered, keys)
        outs, sums = self.group.all_to_all_together([self._by_rank(each, num_kv_heads) for each in made])
        merged = self._merge(ops, list(zip(outs, sums, strict=True)), form)
        return merged if back is None else ops.take_rows(merged.flatten(1), back).view(merged.shape)

    def _forms(self, form: AttentionForm) -> list[AttentionForm]:
        """Returns `form` for the heads of each rank."""
        if form.slopes is None or self.num_same == 1:
            return [form] * self.group.size
        slopes = self.group.all_gather(form.slopes.view(1, -1), dim=0)
        return [form._replace(slopes=each) for each in slopes]

    def _gather(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """Gathers the queries of all ranks, by KV head: [num_parts * num_tokens, num_same * num_heads, size]."""
        if self.num_same == 1:
            return self.group.all_gather(q, dim=0)
        heads = self.group.all_gather(q, dim=1).unflatten(1, (self.num_parts, self.num_same, num_kv_heads, -1))
        return heads.permute(1, 0, 3, 2, 4, 5).flatten(2, 4).flatten(0, 1)

    def _by_rank(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """Orders results for the queries of all ranks by rank: [num_ranks, num_tokens, num_heads, ...]."""
        heads = x.unflatten(1, (num_kv_heads, self.num_same, -1)).unflatten(0, (self.num_parts, -1))
        return heads.movedim(3, 1).flatten(3, 4).flatten(0, 1)

    def _partial(self, form: AttentionForm) -> AttentionForm:
        """Returns `form` over this rank's keys, counted consecutively. Every window contains equally many of them."""
        size = self.shard.size
        return form._replace(
            window=None if form.window is None else form.window // size,
            chunk=None if form.chunk is None else form.chunk // size,
            sinks=None,
            slopes=None if form.slopes is None else form.slopes * size,
        )

    def _merge(self, ops: Backend, parts: list[AttentionPart], form: AttentionForm) -> Tensor:
        """Merges the parts of all ranks for this rank's queries; `form` is that of these queries."""
        if form.sinks is not None:  # a part without values
            out, _ = parts[0]
            parts = [*parts, (torch.zeros_like(out), form.sinks.repeat(len(out), 1))]
        return ops.merge_attention(parts)

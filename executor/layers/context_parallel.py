"""Attention over sequences whose keys and values are divided by position over ranks that hold the same KV heads."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.sequence_shard import SequenceShard
from quire.ops.backend import AttentionBatch, AttentionForm, Backend


class PartialSight(NamedTuple):
    """What a step's tokens see of one rank's part of the positions, and the order in which they attend to it.

    Attributes:
        positions: [num_tokens] int64, in that order; of the tokens in their sequences.
        sees_none: [num_tokens] bool, in that order: there is no key up to the token. It is given one, because kernels
            need one.
        order: [num_tokens] int64, the step's tokens in that order; None: the step's own.
        back: the inverse of `order`.
    """

    positions: Tensor
    sees_none: Tensor
    order: Tensor | None = None
    back: Tensor | None = None


class ContextParallel(ABC):
    """One rank's part of the positions, and the group that has all of them.

    Attributes:
        flag: the option that asks for it.
        divides_tokens: each rank computes the tokens of its positions alone.
        group: the ranks that divide the positions.
        shard: this rank's part.
    """

    flag: ClassVar[str]
    divides_tokens: ClassVar[bool]

    def __init__(self, group: ParallelGroup, run: int) -> None:
        """Runs of `run` positions belong to the ranks of `group` in turn."""
        self.group = group
        self.shard = SequenceShard(group.rank, group.size, run)

    @staticmethod
    def of(config: EngineConfig, tensor: ParallelGroup, group: ParallelGroup | None) -> "ContextParallel | None":
        """What `config` asks for; None if every rank keeps all positions.

        Args:
            tensor: all ranks that share each layer's weights.
            group: the ranks with which this one divides positions; None: it will not compute.
        """
        layout, run = config.layout, config.cp_kv_cache_interleave_size
        if layout.prefill > 1:
            return PrefillContextParallel(group or ParallelGroup(0, layout.prefill), run)
        if layout.context > 1:
            return DecodeContextParallel(group or ParallelGroup(tensor.rank % layout.context, layout.context), run)
        return None

    def check(self, form: AttentionForm) -> None:
        """Raises ModelLoadError for a form that has no counterpart among one rank's keys, see `_partial`."""
        turn = self.shard.run * self.shard.size
        limit = next((size for size in (form.window, form.chunk) if size is not None and size % turn), None)
        if limit is not None:
            raise ModelLoadError(
                f"{self.flag} {self.shard.size} gives the ranks {self.shard.run} positions each in turn "
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

    @abstractmethod
    def check_heads(self, num_ranks: int, num_kv_heads: int) -> None:
        """Raises ModelLoadError if the ranks of the group hold different KV heads.

        Args:
            num_ranks: over which the model's heads are divided.
        """

    @abstractmethod
    def attend(
        self, ops: Backend, q: Tensor, pages: Tensor, batch: AttentionBatch, form: AttentionForm, sight: PartialSight
    ) -> Tensor:
        """`Backend.attention` of `q` [num_tokens, num_heads, head_dim] over all ranks.

        Each rank attends with the queries of all ranks over its own positions, and then merges the parts of its own.

        Args:
            batch: attention to this rank's part, in the order of `sight`.
        """

    def _attend_partly(
        self, ops: Backend, q: Tensor, pages: Tensor, batch: AttentionBatch, form: AttentionForm, sight: PartialSight
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.partial_attention`: of queries of all ranks, in the order of `sight`; `form` is that of `q`."""
        out, lse = ops.partial_attention(q, pages, batch, self._partial(form))
        if form.slopes is not None:
            lse = lse - form.slopes * self._distances(sight).unsqueeze(1)
        return out, lse.masked_fill(self._sees_none(form, sight).unsqueeze(1), -torch.inf)

    def _partial(self, form: AttentionForm) -> AttentionForm:
        """`form` among this rank's keys, which are counted one by one, and of which every window has equally many."""
        size = self.shard.size
        return form._replace(
            window=None if form.window is None else form.window // size,
            chunk=None if form.chunk is None else form.chunk // size,
            sinks=None,
            slopes=None if form.slopes is None else form.slopes * size,
        )

    def _distances(self, sight: PartialSight) -> Tensor:
        """How far each token is from the last of this rank's keys before it: [num_tokens] int64.

        Attention counts biases from that key. No weight of the rank's softmax depends on that; its denominator does.
        """
        last = self.shard.num_own(sight.positions + 1) - 1
        return sight.positions - (last * self.shard.size + self.shard.rank)

    def _sees_none(self, form: AttentionForm, sight: PartialSight) -> Tensor:
        """Whether each token sees no key of this rank: [num_tokens] bool."""
        if form.chunk is None:
            return sight.sees_none
        start = sight.positions - sight.positions % form.chunk
        return self.shard.num_own(sight.positions + 1) == self.shard.num_own(start)

    def _merge(self, ops: Backend, outs: Tensor, sums: Tensor, form: AttentionForm) -> Tensor:
        """Outputs of this rank's queries over all positions; `form` is that of these queries.

        Args:
            outs: [num_ranks, num_tokens, num_heads, head_dim], of each rank's queries over this rank's positions.
            sums: [num_ranks, num_tokens, num_heads] float32, the logarithms of their softmaxes' denominators.
        """
        outs, sums = self.group.all_to_all(outs), self.group.all_to_all(sums)
        parts = list(zip(outs, sums, strict=True))
        if form.sinks is not None:  # a part without values
            parts.append((torch.zeros_like(outs[0]), form.sinks.repeat(outs.shape[1], 1)))
        return ops.merge_attention(parts)


class DecodeContextParallel(ContextParallel):
    """Ranks that compute the same tokens, with different query heads and the same KV heads."""

    flag = "--decode-context-parallel-size"
    divides_tokens = False

    def check_heads(self, num_ranks: int, num_kv_heads: int) -> None:
        """See `ContextParallel.check_heads`."""
        copies, size = max(1, num_ranks // num_kv_heads), self.shard.size
        if copies % size:
            raise ModelLoadError(
                f"--decode-context-parallel-size {size} divides a KV head's positions over ranks that hold it, and "
                f"--tensor-parallel-size {num_ranks} puts each of {num_kv_heads} KV heads on {copies}; choose "
                f"{'a divisor of ' + str(copies) if copies > 1 else 1}."
            )

    def attend(
        self, ops: Backend, q: Tensor, pages: Tensor, batch: AttentionBatch, form: AttentionForm, sight: PartialSight
    ) -> Tensor:
        """See `ContextParallel.attend`."""
        if sight.order is not None:
            q = ops.take_rows(q.flatten(1), sight.order).view(q.shape)
        gathered = form
        if form.slopes is not None:
            gathered = form._replace(slopes=self.group.all_gather(form.slopes, dim=0))
        out, lse = self._attend_partly(ops, self.group.all_gather(q, dim=1), pages, batch, gathered, sight)
        heads = (self.group.size, q.shape[1])
        out, lse = (each.unflatten(1, heads).transpose(0, 1) for each in (out, lse))
        merged = self._merge(ops, out, lse, form)
        return merged if sight.back is None else ops.take_rows(merged.flatten(1), sight.back).view(q.shape)


class PrefillContextParallel(ContextParallel):
    """Ranks with the same heads, of which each computes the tokens of its own positions: equally many on all."""

    flag = "--prefill-context-parallel-size"
    divides_tokens = True

    def check_heads(self, num_ranks: int, num_kv_heads: int) -> None:
        """See `ContextParallel.check_heads`: all have the same."""

    def attend(
        self, ops: Backend, q: Tensor, pages: Tensor, batch: AttentionBatch, form: AttentionForm, sight: PartialSight
    ) -> Tensor:
        """See `ContextParallel.attend`."""
        out, lse = self._attend_partly(ops, self.group.all_gather(q, dim=0), pages, batch, form, sight)
        tokens = (self.group.size, len(q))
        return self._merge(ops, out.unflatten(0, tokens), lse.unflatten(0, tokens), form)

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
        sees_none: [num_tokens] bool, in that order: the token sees no key. It is given one, because kernels need one.
        order: [num_tokens] int64, the step's tokens in that order; None: the step's own.
        back: the inverse of `order`.
    """

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
        """Raises ModelLoadError for attention that depends on where keys lie in a sequence, or has sinks."""
        if (form.window, form.chunk, form.sinks, form.slopes) != (None, None, None, None):
            raise ModelLoadError(
                f"{self.flag} needs attention to all tokens alike; this model has windows, chunks, "
                "sinks or ALiBi. Use --tensor-parallel-size alone."
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
        """See `Backend.partial_attention`: of queries of all ranks, in the order of `sight`."""
        out, lse = ops.partial_attention(q, pages, batch, form)
        return out, lse.masked_fill(sight.sees_none.unsqueeze(1), -torch.inf)

    def _merge(self, ops: Backend, outs: Tensor, sums: Tensor) -> Tensor:
        """Outputs of this rank's queries over all positions.

        Args:
            outs: [num_ranks, num_tokens, num_heads, head_dim], of each rank's queries over this rank's positions.
            sums: [num_ranks, num_tokens, num_heads] float32, the logarithms of their softmaxes' denominators.
        """
        outs, sums = self.group.all_to_all(outs), self.group.all_to_all(sums)
        return ops.merge_attention(list(zip(outs, sums, strict=True)))


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
        out, lse = self._attend_partly(ops, self.group.all_gather(q, dim=1), pages, batch, form, sight)
        heads = (self.group.size, q.shape[1])
        merged = self._merge(ops, out.unflatten(1, heads).transpose(0, 1), lse.unflatten(1, heads).transpose(0, 1))
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
        return self._merge(ops, out.unflatten(0, tokens), lse.unflatten(0, tokens))

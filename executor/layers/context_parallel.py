"""Attention over sequences whose keys and values are divided by position over ranks that hold the same KV heads."""

from typing import NamedTuple

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


class ContextParallel:
    """One rank's part of the positions, and the group that has all of them. The ranks have different query heads.

    Attributes:
        shard: the part.
    """

    def __init__(self, group: ParallelGroup, run: int) -> None:
        """Runs of `run` positions belong to the ranks of `group` in turn."""
        self._group = group
        self.shard = SequenceShard(group.rank, group.size, run)

    @classmethod
    def of(cls, config: EngineConfig, tensor: ParallelGroup, group: ParallelGroup | None) -> "ContextParallel | None":
        """What `config` asks for; None if every rank keeps all positions.

        Args:
            tensor: all ranks that share each layer's weights.
            group: those of them with which the rank divides positions; None: it will not compute.
        """
        size = config.layout.context
        if size == 1:
            return None
        return cls(group or ParallelGroup(tensor.rank % size, size), config.cp_kv_cache_interleave_size)

    def check(self, form: AttentionForm) -> None:
        """Raises ModelLoadError for attention that depends on where keys lie in a sequence, or has sinks."""
        if (form.window, form.chunk, form.sinks, form.slopes) != (None, None, None, None):
            raise ModelLoadError(
                "--decode-context-parallel-size needs attention to all tokens alike; this model has windows, chunks, "
                "sinks or ALiBi. Use --tensor-parallel-size alone."
            )

    def check_heads(self, num_ranks: int, num_kv_heads: int) -> None:
        """Raises ModelLoadError if the ranks of the group hold different KV heads."""
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
        """`Backend.attention` of `q` [num_tokens, num_heads, head_dim] over all ranks.

        Each rank attends with the queries of all ranks over its own positions, and then merges the parts of its own.

        Args:
            batch: attention to this rank's part, in the order of `sight`.
        """
        if sight.order is not None:
            q = ops.take_rows(q.flatten(1), sight.order).view(q.shape)
        out, lse = ops.partial_attention(self._group.all_gather(q, dim=1), pages, batch, form)
        lse = lse.masked_fill(sight.sees_none.unsqueeze(1), -torch.inf)
        heads = (self._group.size, q.shape[1])
        parts = (x.unflatten(1, heads).transpose(0, 1) for x in (out, lse))  # by the rank whose queries they are
        outs, sums = (self._group.all_to_all(part) for part in parts)
        merged = ops.merge_attention(list(zip(outs, sums, strict=True)))
        return merged if sight.back is None else ops.take_rows(merged.flatten(1), sight.back).view(q.shape)

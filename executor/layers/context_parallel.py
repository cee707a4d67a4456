"""Attention over sequences whose keys and values are divided by position over ranks that hold the same KV heads."""

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.sequence_shard import SequenceShard
from quire.ops.backend import AttentionForm, Backend


class ContextParallel:
    """One rank's part of the positions, and the group that has all of them.

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
        self, ops: Backend, q: Tensor, pages: Tensor, batch: object, form: AttentionForm, positions: Tensor
    ) -> Tensor:
        """`Backend.attention` of `q` [num_tokens, num_heads, head_dim], at `positions` [num_tokens], over all ranks.

        Each rank attends with the queries of all ranks over its own positions; then each merges the parts of its own
        heads, weighted by their shares of the whole softmax.
        """
        group, (num_tokens, num_heads, _) = self._group, q.shape
        out, lse = ops.partial_attention(group.all_gather(q, dim=1), pages, batch, form)
        sees_none = self.shard.num_own(positions + 1) == 0  # the kernel was given one key, because it needs some
        lse = lse.masked_fill(sees_none.unsqueeze(1), -torch.inf)
        own = slice(group.rank * num_heads, (group.rank + 1) * num_heads)
        outs = group.all_gather(out, dim=0).unflatten(0, (group.size, num_tokens))[:, :, own]
        sums = group.all_gather(lse, dim=0).unflatten(0, (group.size, num_tokens))[:, :, own]
        shares = sums.softmax(dim=0).unsqueeze(-1)
        return (outs.float() * shares).masked_fill(shares == 0, 0).sum(dim=0).to(q.dtype)

"""Attention over sequences whose keys and values are divided by position over ranks that hold the same KV heads."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.sequence_shard import SequenceShard
from quire.ops.backend import AttentionBatch, AttentionForm, Backend

CHUNKS: tuple[Literal["own", "previous", "earlier"], ...] = ("own", "previous", "earlier")
"""See `AttentionForm.chunks`."""

AttendPartly = Callable[[Tensor, AttentionForm], tuple[Tensor, Tensor]]
"""See `Backend.partial_attention`: of queries, over one rank's keys."""


class PartialSight(NamedTuple):
    """What a step's tokens see of one rank's part of the positions, and the order in which they attend to it.

    Attributes:
        positions: [num_tokens of all parts] int64, in that order; of the tokens in their sequences. The tokens of each
            part follow those of the part before.
        sees_none: [num_tokens of all parts] bool, in that order: there is no key up to the token. It is given one,
            because kernels need one.
        longest: tokens of the longest sequence up to one of these tokens.
        order: [num_tokens] int64, this rank's tokens in that order; None: as they are.
        back: the inverse of `order`.
    """

    positions: Tensor
    sees_none: Tensor
    longest: int
    order: Tensor | None = None
    back: Tensor | None = None


class ContextParallel:
    """One rank's part of the positions, and the group that has all of them.

    The ranks of the group are `num_parts` times as many as those that compute the same tokens, which hold the same KV
    heads, and different query heads.

    Attributes:
        flag: the option that asks for it; of two, the one that divides tokens.
        num_parts: into which the tokens of each step are divided, by their positions.
        num_same: ranks that compute the same tokens: neighbours in the group.
        group: the ranks that divide the positions.
        shard: this rank's part.
    """

    def __init__(self, group: ParallelGroup, num_parts: int, run: int) -> None:
        """Runs of `run` positions belong to the ranks of `group` in turn."""
        self.flag = f"--{'prefill' if num_parts > 1 else 'decode'}-context-parallel-size"
        self.num_parts = num_parts
        self.num_same = group.size // num_parts
        self.group = group
        self.shard = SequenceShard(group.rank, group.size, run)

    @staticmethod
    def of(config: EngineConfig, tensor: ParallelGroup, group: ParallelGroup | None) -> "ContextParallel | None":
        """What `config` asks for; None if every rank keeps all positions.

        Args:
            tensor: all ranks that share each layer's weights.
            group: the ranks with which this one divides positions; None: it will not compute.
        """
        layout = config.layout
        if layout.sequence == 1:
            return None
        group = group or ParallelGroup(tensor.rank % layout.context, layout.sequence)
        return ContextParallel(group, layout.prefill, config.cp_kv_cache_interleave_size)

    @property
    def divides_tokens(self) -> bool:
        """Whether a rank computes some of a step's tokens alone."""
        return self.num_parts > 1

    def check(self, form: AttentionForm) -> None:
        """Raises ModelLoadError for a form that has no counterpart among one rank's keys, see `_partial`."""
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
        """Raises ModelLoadError if ranks that compute the same tokens hold different KV heads.

        Args:
            num_ranks: over which the model's heads are divided.
        """
        copies = max(1, num_ranks // num_kv_heads)
        if copies % self.num_same:
            raise ModelLoadError(
                f"--decode-context-parallel-size {self.num_same} divides a KV head's positions over ranks that hold "
                f"it, and --tensor-parallel-size {num_ranks} puts each of {num_kv_heads} KV heads on {copies}; choose "
                f"{'a divisor of ' + str(copies) if copies > 1 else 1}."
            )

    def activation_size(self, num_heads: int, size: int, value_size: int) -> int:
        """Numbers that a layer's attention makes of each token of a step for other ranks, and gets from them.

        Args:
            num_heads: queries of a rank.
            size: of a query.
            value_size: of what a query attends to.
        """
        return self.num_same * num_heads * (size + 3 * value_size)  # results are made, laid out by ranks, and received

    def attend(
        self,
        ops: Backend,
        q: Tensor,
        pages: Tensor,
        batch: AttentionBatch,
        form: AttentionForm,
        sight: PartialSight,
        num_kv_heads: int = 1,
    ) -> Tensor:
        """`Backend.attention` of `q` [num_tokens, num_heads, head_dim] over all ranks.

        Args:
            batch: attention to this rank's part, in the order of `sight`.
            num_kv_heads: of the rank, if others compute the same tokens.
        """

        def attend_partly(q: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
            return ops.partial_attention(q, pages, batch, form)

        return self._attend(ops, q, form, sight, attend_partly, num_kv_heads)

    def attend_to_latents(
        self,
        ops: Backend,
        q: Tensor,
        q_rotated: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        sight: PartialSight,
        *,
        scale: float,
    ) -> Tensor:
        """`LatentOperations.latent_attention` over all ranks; `batch` is as for `attend`."""
        rank = q.shape[2]

        def attend_partly(q: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
            return ops.latent.partial_latent_attention(q[..., :rank], q[..., rank:], cache, batch, scale=form.scale)

        return self._attend(ops, torch.cat((q, q_rotated), dim=-1), AttentionForm(scale), sight, attend_partly)

    def attend_in_chunks(
        self,
        ops: Backend,
        queries: Sequence[Tensor],
        pages: Tensor,
        batch: AttentionBatch,
        form: AttentionForm,
        sight: PartialSight,
    ) -> Tensor:
        """Attention of each token to its own, the previous and all earlier chunks, with a query for each of the three.

        Args:
            queries: each as `q` for `attend`, which says what else is given.
            form: the chunks' size, and no more than that and a scale.
        """

        def attend_partly(q: Tensor, form: AttentionForm) -> tuple[Tensor, Tensor]:
            own, previous, earlier = q.chunk(3, dim=-1)
            # Where no key of a token's chunk is this rank's, its last key is one of the previous chunk. The kernels
            # take that chunk for the token's own, because they count keys.
            is_behind = self._sees_none(chunks, sight).view(-1, 1, 1)
            turned = torch.where(is_behind, previous, own), torch.where(is_behind, earlier, previous), earlier
            form = form._replace(chunk=partial.chunk)
            parts = [
                ops.partial_attention(each, pages, batch, form._replace(chunks=which))
                for which, each in zip(CHUNKS, turned, strict=True)
            ]
            return ops.merge_attention(parts), torch.stack([lse for _, lse in parts]).logsumexp(dim=0)

        chunks, partial = form, self._partial(form)
        return self._attend(ops, torch.cat(tuple(queries), dim=-1), form._replace(chunk=None), sight, attend_partly)

    def _attend(
        self,
        ops: Backend,
        q: Tensor,
        form: AttentionForm,
        sight: PartialSight,
        attend_partly: AttendPartly,
        num_kv_heads: int = 1,
    ) -> Tensor:
        """Each rank attends with the queries of all ranks over its own positions, and merges the parts of its own.

        `q` is [num_tokens, num_heads, size], and `form` is that of its heads.
        """
        if sight.order is not None:
            q = ops.take_rows(q.flatten(1), sight.order).view(q.shape)
        gathered = form
        if form.slopes is not None and self.num_same > 1:
            slopes = self._gather(form.slopes.view(1, -1, 1), num_kv_heads)  # the same of each part
            gathered = form._replace(slopes=slopes[0, :, 0])
        out, lse = attend_partly(self._gather(q, num_kv_heads), self._partial(gathered))
        if gathered.slopes is not None:
            lse = lse - gathered.slopes * self._distances(sight).unsqueeze(1)
        lse = lse.masked_fill(self._sees_none(form, sight).unsqueeze(1), -torch.inf)
        out, lse = (self._by_rank(each, num_kv_heads) for each in (out, lse))
        merged = self._merge(ops, out, lse, form)
        return merged if sight.back is None else ops.take_rows(merged.flatten(1), sight.back).view(merged.shape)

    def _gather(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """The queries of all ranks, by KV head: [num_parts * num_tokens, num_same * num_heads, size]."""
        if self.num_same == 1:
            return self.group.all_gather(q, dim=0)
        heads = self.group.all_gather(q, dim=1).unflatten(1, (self.num_parts, self.num_same, num_kv_heads, -1))
        return heads.permute(1, 0, 3, 2, 4, 5).flatten(2, 4).flatten(0, 1)

    def _by_rank(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """What belongs to the queries of each rank, of those of all: [num_ranks, num_tokens, num_heads, ...]."""
        heads = x.unflatten(1, (num_kv_heads, self.num_same, -1)).unflatten(0, (self.num_parts, -1))
        return heads.movedim(3, 1).flatten(3, 4).flatten(0, 1)

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

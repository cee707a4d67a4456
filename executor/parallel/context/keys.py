"""One rank's part of the keys of sequences, for the tokens of a step."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.executor.parallel.context.shard import SequenceShard
from quire.ops.backend import AttentionBatch


class ShardView(NamedTuple):
    """One rank's part of the positions, as tokens see it, and the order in which they attend to it.

    Attributes:
        shard: that part.
        positions: [num_tokens of all parts] int64, in that order: in the tokens' sequences. The tokens of each
            part follow those of the part before.
        sees_none: [num_tokens of all parts] bool, in that order: no key up to the token. Kernels need one, so the token
            gets an arbitrary one.
        longest: tokens of the longest sequence up to one of these tokens.
        order: [num_tokens] int64, this rank's tokens in that order; None: unchanged.
        back: the inverse of `order`.
        rounds: the views while blocks travel from rank to rank; None: ranks gather their queries.
    """

    shard: SequenceShard
    positions: Tensor
    sees_none: Tensor
    longest: int
    order: Tensor | None = None
    back: Tensor | None = None
    rounds: "Rounds | None" = None

    def sees_none_of(self, chunk: int | None) -> Tensor:
        """Returns [num_tokens] bool: True for tokens that see no key of the part within their chunk."""
        if chunk is None:
            return self.sees_none
        start = self.positions - self.positions % chunk
        return self.shard.num_own(self.positions + 1) == self.shard.num_own(start)

    def distances(self) -> Tensor:
        """Returns each token's distance to the part's last key before it: [num_tokens] int64.

        Attention counts biases from that key. No weight of the part's softmax depends on that; its denominator does.
        """
        last = self.shard.num_own(self.positions + 1) - 1
        return self.positions - (last * self.shard.size + self.shard.rank)


class StepKeys(Protocol):
    """The keys that a step's tokens attend to, or some of its tokens; see `StepContext`."""

    @property
    def attention(self) -> Sequence[AttentionBatch]: ...

    @property
    def shard_view(self) -> ShardView | None: ...


class PartialKeys(NamedTuple):
    """The keys and values of one rank's part, and the tokens that attend to them.

    Attributes:
        pages: [num_pages, ...], of one layer.
        batch: the attention of the tokens to these pages.
        shard_view: of these tokens.
        group: the layer's KV group.
    """

    pages: Tensor
    batch: AttentionBatch
    shard_view: ShardView
    group: int

    @classmethod
    def of(cls, pages: Tensor, own: StepKeys, group: int) -> "PartialKeys | None":
        """Returns the keys in `pages` for the tokens of `own`; None if these see all positions there."""
        return None if own.shard_view is None else cls(pages, own.attention[group], own.shard_view, group)


class Rounds(Protocol):
    """Pairs of ranks' tokens and keys in one step; all ranks have equally many of both."""

    def of_queries(self, rank: int, keys: PartialKeys) -> PartialKeys:
        """Returns the keys of this rank, for the tokens of `rank`."""
        ...

    def of_keys(self, rank: int, block: Tensor, keys: PartialKeys) -> PartialKeys:
        """Returns the keys of `rank`, which are in the pages `block`, for this rank's tokens."""
        ...

    def page_ids(self, group: int) -> Tensor:
        """Returns the pages of the KV group that the step's tokens see, [n] int64 on the device; they form a block."""
        ...


def block_of(keys: PartialKeys, page_ids: Tensor) -> Tensor:
    """Copies some of the pages: [len(page_ids), ...]."""
    return torch.index_select(keys.pages, 0, page_ids)

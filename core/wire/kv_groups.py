"""KV groups: layers that cache the same kind of state of a sequence. All share one pool of pages."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

NO_PAGE = 0
"""The entry of a block table for a block without a page. Page 0 is a page like others, and may hold anything.

A group of the kind "window" has no pages for blocks that no token still to be computed sees.
"""


class KVGroupSpec(Struct, array_like=True, frozen=True):
    """Layers that cache the same kind of state, so that one block table serves them all.

    The kinds of groups:

    - "full": a token sees every token before it;
    - "window": a token sees the last `window` tokens, itself included;
    - "cross": a token of the decoder sees all of what the encoder has read. The pages are written once, when a request
      is admitted, and are as many as the input takes. So they have a list of their own beside the block tables.
    - "recurrent": a layer keeps a state of fixed size, which each token changes. It lies in the request's slot, so
      this group has no block tables. Copies of the state after every `interval` tokens, its snapshots, lie in pages,
      where the prefix cache finds them. A model has at most one such group, after all others.

    Any page of the pool may serve any group, so pages of all groups have equally many bytes. Workers keep as many cache
    tensors as the largest group has layers; the j-th layer of each group uses the j-th tensor.
    """

    kind: Literal["full", "window", "cross", "recurrent"]
    layers: list[int]  # indices among the model's layers that keep keys and values, or among the recurrent ones
    page_bytes: int  # of one page on one rank, over all layers of the group; the same for all groups of a model
    window: int | None = None  # tokens
    state_bytes: int = 0  # of one sequence's state on one rank, over all layers of the group
    interval: int | None = None  # tokens between two snapshots, whole pages of them; None: no snapshots
    encoder_rows: int | None = None  # most rows of an encoder input; of a cross group alone

    def __post_init__(self) -> None:
        fits = self.window is None if self.kind != "window" else self.window is not None and self.window > 0
        if not fits:
            raise ValueError(f"a {self.kind} KV group cannot have the window {self.window}")
        if self.is_recurrent != (self.state_bytes > 0) or (self.interval and not self.is_recurrent):
            raise ValueError(f"a {self.kind} KV group cannot have {self.state_bytes} bytes of state")
        if self.is_cross != bool(self.encoder_rows):
            raise ValueError(f"a {self.kind} KV group cannot have {self.encoder_rows} rows of an encoder")

    @property
    def is_recurrent(self) -> bool:
        """True if its layers keep a state, and no block table lists their pages."""
        return self.kind == "recurrent"

    @property
    def is_cross(self) -> bool:
        """True if its pages hold an encoder input, whatever the number of the sequence's tokens."""
        return self.kind == "cross"

    @property
    def has_block_table(self) -> bool:
        """True if a block table lists its pages, which hold the sequence's tokens in order."""
        return not self.is_recurrent and not self.is_cross

    @property
    def snapshot_pages(self) -> int:
        """Pages of one snapshot; 0 for groups that have none."""
        return 0 if self.interval is None else -(-self.state_bytes // self.page_bytes)

    def max_pages(self, num_tokens: int, *, block_size: int, largest_chunk: int) -> int:
        """Pages of this group that a request of `num_tokens` tokens, all of them computed, holds at its worst moment.

        No request holds snapshots: they are found, or they are not.

        Args:
            largest_chunk: the most tokens of a request that one step computes.
        """
        if self.is_recurrent:
            return 0
        if self.encoder_rows is not None:
            return -(-self.encoder_rows // block_size)
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        # A step reads the window of its chunk's first token and writes the chunk; that span may begin mid-page.
        span = self.window - 1 + largest_chunk
        return min(num_blocks, -(-(span - 1) // block_size) + 1)


def keeps_nothing(groups: Sequence[KVGroupSpec]) -> bool:
    """Returns True for an encoder, which keeps nothing of a sequence from step to step."""
    return not groups


def shares_prefixes(groups: Sequence[KVGroupSpec], *, whole_prompts: bool = False) -> bool:
    """Returns True if a request can continue from a prefix of another.

    A state without snapshots cannot be shared, nor can anything where `whole_prompts` are prefix spans.
    """
    return bool(groups) and not whole_prompts and all(group.interval or not group.is_recurrent for group in groups)

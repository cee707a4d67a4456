"""What a model's layers keep of a sequence, in groups: each has a block table, and all share one pool of pages."""

from typing import Literal

from msgspec import Struct

NO_PAGE = 0
"""Stands in a block table for a block without a page. It is a page like others, and may hold anything.

A group of the kind "window" has no pages for blocks that no token still to be computed sees.
"""


class KVGroupSpec(Struct, array_like=True, frozen=True):
    """Layers that keep the same of a sequence, so that one block table serves them all.

    Only kinds that a model here has are listed; others arrive with their first model.

    - "full": a token sees every token before it;
    - "window": a token sees the last `window` tokens, itself included.

    Any page of the pool may serve any group, so pages of all groups have equally many bytes. Workers keep as many
    cache tensors as the largest group has layers; the j-th layer of each group uses the j-th tensor.
    """

    kind: Literal["full", "window"]
    layers: list[int]  # indices of the model's layers, in order
    page_bytes: int  # of one page on one rank, in all layers of the group together; the same for all groups of a model
    window: int | None = None  # tokens

    def __post_init__(self) -> None:
        fits = self.window is None if self.kind == "full" else self.window is not None and self.window > 0
        if not fits:
            raise ValueError(f"a {self.kind} KV group cannot have the window {self.window}")

    def max_pages(self, num_tokens: int, *, block_size: int, largest_chunk: int) -> int:
        """Pages of this group that a request of `num_tokens` tokens, all of them computed, holds at its worst moment.

        Args:
            largest_chunk: tokens that one step computes of a request at most.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        # A step reads what the first token of its chunk sees, and writes the chunk; a page may begin anywhere in that.
        span = self.window - 1 + largest_chunk
        return min(num_blocks, -(-(span - 1) // block_size) + 1)

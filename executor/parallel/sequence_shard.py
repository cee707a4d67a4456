"""The positions of every sequence whose keys and values a rank keeps, where several ranks hold the same KV heads."""

from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

Integers = TypeVar("Integers", np.ndarray, Tensor)


class SequenceShard(NamedTuple):
    """Runs of `run` positions belong to `size` ranks in turn; this is the part of number `rank`.

    A page of the scheduler holds `size` times as many tokens as it has slots on a rank, in which a rank keeps its
    positions one after another. So the first pages of a sequence are full on all ranks, or on none.
    """

    rank: int
    size: int
    run: int

    def owner(self, positions: np.ndarray) -> np.ndarray:
        """The number of the rank that keeps each position; any shape of integers."""
        return positions // self.run % self.size

    def num_own(self, num_tokens: Integers) -> Integers:
        """How many of a sequence's first `num_tokens` positions are this rank's; any shape of integers."""
        turn = self.run * self.size
        rest = num_tokens % turn - self.rank * self.run
        return num_tokens // turn * self.run + rest.clip(0, self.run)

    def slots(self, pages: np.ndarray, offsets: np.ndarray, block_size: int, spare_page: int) -> np.ndarray:
        """Where this rank writes tokens, all [num_tokens] int64: those of other ranks on a page that nobody reads.

        Args:
            pages: of the tokens.
            offsets: of the tokens in their pages, below `block_size`.
        """
        turns, rest = np.divmod(offsets, self.run * self.size)
        is_own = rest // self.run == self.rank
        places = turns * self.run + rest % self.run
        return np.where(is_own, pages, spare_page) * (block_size // self.size) + places

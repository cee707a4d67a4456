"""The positions of every sequence whose keys and values a rank holds, if several ranks hold the same KV heads."""

from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

Integers = TypeVar("Integers", np.ndarray, Tensor)


class SequenceShard(NamedTuple):
    """One rank's part: runs of `run` positions belong to `size` ranks in turn, and this rank is number `rank`.

    A page of the scheduler has `size` times as many tokens as slots on a rank. A rank stores its positions in it
    consecutively. So the first pages of a sequence are full on all ranks, or on none.
    """

    rank: int
    size: int
    run: int

    def owner(self, positions: np.ndarray) -> np.ndarray:
        """Returns the rank that holds each position; any shape of integers."""
        return positions // self.run % self.size

    def num_own(self, num_tokens: Integers) -> Integers:
        """Counts this rank's positions among a sequence's first `num_tokens`; any shape of integers."""
        turn = self.run * self.size
        rest = num_tokens % turn - self.rank * self.run
        return num_tokens // turn * self.run + rest.clip(0, self.run)

    def slots(self, pages: np.ndarray, offsets: np.ndarray, block_size: int, spare_page: int) -> np.ndarray:
        """Returns this rank's slots for tokens, all [num_tokens] int64. Tokens of other ranks go to an unused page.

        Args:
            pages: of the tokens.
            offsets: of the tokens in their pages, below `block_size`.
        """
        turns, rest = np.divmod(offsets, self.run * self.size)
        is_own = rest // self.run == self.rank
        places = turns * self.run + rest % self.run
        return np.where(is_own, pages, spare_page) * (block_size // self.size) + places

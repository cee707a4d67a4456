"""Divides a step's tokens among ranks."""

from typing import NamedTuple

import numpy as np


class TokenShares(NamedTuple):
    """The division of tokens: equally many for each rank, its own and then, if others have more, padding.

    Attributes:
        tokens: [num_ranks, most tokens of a rank] int64; flat indices of the step's tokens, by rank.
        places: [n] int64; the flat index in `tokens` of each of the divided tokens.
    """

    tokens: np.ndarray
    places: np.ndarray

    @property
    def size(self) -> int:
        """The number of each rank's tokens."""
        return self.tokens.shape[1]

    @classmethod
    def of(cls, tokens: np.ndarray, owners: np.ndarray, fillers: np.ndarray, num_same: int = 1) -> "TokenShares":
        """Gives each of `tokens` [n], at least one, to its owner [n], and pads with `fillers` [num_ranks].

        `num_same` neighbouring owners are one rank here, which gets their tokens one owner after another.
        """
        counts = np.bincount(owners // num_same, minlength=len(fillers))
        shares = np.repeat(fillers[:, None], counts.max(), axis=1)
        order = np.argsort(owners, kind="stable")
        ranks = owners[order] // num_same
        columns = np.arange(len(tokens)) - (np.cumsum(counts) - counts)[ranks]
        shares[ranks, columns] = tokens[order]
        places = np.empty_like(order)
        places[order] = ranks * shares.shape[1] + columns
        return cls(shares, places)

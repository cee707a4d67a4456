"""The interface of a grammar library to the sampler."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class MatcherError(Exception):
    """The matcher gave up: the grammar is too complex at this place. The message is for the client."""


class Matcher(ABC):
    """The state of one request's output in its grammar."""

    @abstractmethod
    def fill(self, bitmask: np.ndarray, row: int) -> None:
        """Writes the allowed next tokens: bit `i % 32` of `bitmask[row, i // 32]` is set for token i.

        Args:
            bitmask: [num_rows, ceil(vocab_size / 32)] int32, contiguous.

        Raises:
            MatcherError: the matcher gave up.
        """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advances by one token. Returns False and changes nothing if the grammar does not allow the token."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes the last accepted tokens back."""

    @staticmethod
    def fill_all(matchers: Sequence[Any], bitmask: np.ndarray, rows: Sequence[int]) -> None:
        """`fill` for matchers of this class, of any grammars and vocabularies, each in its row.

        Raises:
            Exception: one of the matchers failed; the rows of all others are undefined.
        """
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(bitmask, row)


class Loader(Protocol):
    """One library, set up for one vocabulary. Its methods may be called from any one thread at a time."""

    def load(self, data: bytes) -> object:
        """The object that matchers of one grammar share. The frontend's backend of the same name made `data`."""

    def matcher(self, loaded: object) -> Matcher:
        """A matcher at the start of its grammar."""

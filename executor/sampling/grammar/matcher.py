"""What a grammar library must do for the sampler."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class MatcherError(Exception):
    """The matcher gave up: the grammar is too complex at this place. The message is for the client."""


class Matcher(ABC):
    """How far one request's output has come in its grammar."""

    @abstractmethod
    def fill(self, bitmask: np.ndarray, row: int) -> None:
        """Writes which tokens may come next: bit `i % 32` of `bitmask[row, i // 32]` is set for token i.

        Args:
            bitmask: [num_rows, ceil(vocab_size / 32)] int32, contiguous.

        Raises:
            MatcherError: it cannot be told.
        """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and nothing changes, if the grammar does not allow it."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes the last accepted tokens back."""

    @staticmethod
    def fill_all(matchers: Sequence[Any], bitmask: np.ndarray, rows: Sequence[int]) -> None:
        """`fill` for matchers of this class, of any grammars and vocabularies, each in its row.

        Raises:
            Exception: for one of them it cannot be told; what is in the rows of the others then means nothing.
        """
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(bitmask, row)


class Loader(Protocol):
    """One library, set up for one vocabulary. Its methods may be called from any one thread at a time."""

    def load(self, data: bytes) -> object:
        """What matchers of one grammar share. `data` was made by the backend of the same name in the frontend."""

    def matcher(self, loaded: object) -> Matcher:
        """A matcher at the start of its grammar."""

"""What a grammar library must do for the sampler."""

from typing import Protocol

import numpy as np


class MatcherError(Exception):
    """The matcher gave up: the grammar is too complex at this place. The message is for the client."""


class Matcher(Protocol):
    """How far one request's output has come in its grammar."""

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        """Writes which tokens may come next: bit `i % 32` of `bitmask[row, i // 32]` is set for token i.

        Args:
            bitmask: [num_rows, ceil(vocab_size / 32)] int32, contiguous.

        Raises:
            MatcherError: it cannot be told.
        """

    def accept(self, token_id: int) -> bool:
        """Goes on by one token; False, and nothing changes, if the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Takes the last accepted tokens back."""


class Loader(Protocol):
    """One library, set up for one vocabulary. Its methods may be called from any one thread at a time."""

    def load(self, data: bytes) -> object:
        """What matchers of one grammar share. `data` was made by the backend of the same name in the frontend."""

    def matcher(self, loaded: object) -> Matcher:
        """A matcher at the start of its grammar."""

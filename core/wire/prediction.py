"""A predicted output, followed along the real one: what comes next where the two agree.

The worker takes drafts from it, and the frontend counts with it what became true. Both see the same tokens, so they
agree, and a replayed request is counted as if nothing had happened.
"""

from array import array
from collections.abc import Sequence

_NEAR = ((2, 64), (1, 8))
"""After a difference, so many equal tokens within so many places are enough to go on there."""
_ANYWHERE = 3
"""So many are enough at any later place."""


class Prediction:
    """The tokens of a prediction, which several walks may share."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._packed = array("i", self.token_ids).tobytes()

    def find(self, run: list[int], start: int) -> int | None:
        """The first place from `start` on where the tokens of `run` stand; None: nowhere."""
        wanted, size = array("i", run).tobytes(), array("i").itemsize
        found = self._packed.find(wanted, start * size)
        while found % size:  # between two tokens; -1, nowhere, is none either
            if found < 0:
                return None
            found = self._packed.find(wanted, found + 1)
        return found // size


class PredictionWalk:
    """A place in a prediction, which only moves forward.

    Attributes:
        num_right: tokens of the output that stood in the prediction where it was expected to go on.
    """

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._tokens = prediction.token_ids
        self._place = 0  # of the next token, if the output goes on as predicted
        self._is_lost = False  # the newest token was not predicted
        self._tail: list[int] = []
        self.num_right = 0

    @property
    def num_wrong(self) -> int:
        """Tokens of the prediction that are not in the output so far, or not where they were expected."""
        return len(self._tokens) - self.num_right

    def push(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the output."""
        for token_id in token_ids:
            self._tail = [*self._tail[1 - _ANYWHERE :], token_id]
            if self._place < len(self._tokens) and self._tokens[self._place] == token_id:
                self._place += 1
                self.num_right += 1
                self._is_lost = False
            else:
                found = self._find()
                self._is_lost = found is None
                self._place = self._place if found is None else found

    def next(self, most: int) -> list[int]:
        """The next tokens, `most` at most; none while the output differs."""
        return [] if self._is_lost else self._tokens[self._place : self._place + most]

    def _find(self) -> int | None:
        """The first place after the newest tokens of the output, from the current place on."""
        if len(self._tail) == _ANYWHERE and (start := self._prediction.find(self._tail, self._place)) is not None:
            return start + _ANYWHERE
        for length, distance in _NEAR:
            tail = self._tail[-length:]
            for start in range(self._place, min(self._place + distance, len(self._tokens) - length + 1)):
                if len(tail) == length and self._tokens[start : start + length] == tail:
                    return start + length
        return None

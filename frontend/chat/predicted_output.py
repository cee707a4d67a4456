"""Counts how much of an answer its client has predicted."""

from collections.abc import Sequence

from quire.core.wire.prediction import PredictionWalk


class PredictedOutput:
    """A prediction beside the outputs of all sequences.

    Args:
        token_ids: of the prediction.
    """

    def __init__(self, token_ids: Sequence[int], num_choices: int) -> None:
        self._walks = [PredictionWalk(token_ids) for _ in range(num_choices)]

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of a sequence."""
        self._walks[index].push(token_ids)

    @property
    def counts(self) -> tuple[int, int]:
        """The tokens of the prediction, once for each sequence, that are in its output, and those that are not."""
        return sum(each.num_right for each in self._walks), sum(each.num_wrong for each in self._walks)

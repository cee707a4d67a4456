"""Counts how much of an answer its client has predicted."""

from collections.abc import Sequence

from quire.core.wire.prediction import Prediction, PredictionWalk


class PredictedOutput:
    """A prediction beside the outputs of all sequences.

    Args:
        token_ids: of the prediction.
    """

    def __init__(self, token_ids: Sequence[int], num_choices: int) -> None:
        self._prediction = Prediction(token_ids)
        self._num_choices = num_choices
        self._walks: dict[int, PredictionWalk] = {}  # by sequence, once it has tokens

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of a sequence."""
        if (walk := self._walks.get(index)) is None:
            walk = self._walks[index] = PredictionWalk(self._prediction)
        walk.push(token_ids)

    @property
    def counts(self) -> tuple[int, int]:
        """The tokens of the prediction, once for each sequence, that are in its output, and those that are not."""
        num_right = sum(each.num_right for each in self._walks.values())
        return num_right, self._num_choices * len(self._prediction.token_ids) - num_right

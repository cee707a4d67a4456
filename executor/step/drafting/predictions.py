"""Drafts that a request brings: the output that its client predicts."""

from quire.core.wire.prediction import Prediction, PredictionWalk
from quire.core.wire.protocol import NewSlot
from quire.executor.step.request_table import RequestTable


class Predictions:
    """Follows each request's prediction along its output."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._walks: dict[int, PredictionWalk] = {}  # by slot
        self._num_seen: dict[int, int] = {}  # by slot, tokens that its walk knows, those of the prompt included

    def admit(self, request: NewSlot) -> None:
        """Adds the prediction of a request that enters a slot, at the end of its output so far."""
        self.release([request.slot])
        if request.prediction:
            walk = self._walks[request.slot] = PredictionWalk(Prediction(request.prediction))
            walk.push(request.token_ids[request.num_prompt_tokens :])
            self._num_seen[request.slot] = len(request.token_ids)

    def release(self, slots: list[int]) -> None:
        """Drops the predictions of these slots."""
        for slot in slots if self._walks else ():
            self._walks.pop(slot, None)
            self._num_seen.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._walks

    def drafts(self, slot: int, num_known: int, most: int) -> list[int]:
        """The next tokens of the prediction, `most` at most."""
        walk, seen = self._walks[slot], self._num_seen[slot]
        walk.push(self._table.token_ids[slot, seen:num_known].tolist())
        self._num_seen[slot] = num_known
        return walk.next(most)

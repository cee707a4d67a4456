"""Decides which images and sounds a step's towers read, and which rows of earlier steps the workers forget.

A tower reads an item whole, in the step that computes the first token with one of its rows. The workers keep the rows,
so that later chunks of the prompt, and other requests with the same item, find them. Of items that no running request
is in the midst of, those unused for longest are forgotten when there is no room.
"""

from collections.abc import Callable, Sequence

from quire.core.wire.media import MediaItem
from quire.core.wire.protocol import StepPlan


class TowerRows:
    """The rows that workers hold, by the digest of their item.

    Args:
        max_rows: rows that the towers make in a step. A larger item has a step of its own.
        max_held: rows that workers hold; those of a step at least.
    """

    def __init__(self, max_rows: int, max_held: int = 0) -> None:
        self._max_rows = max_rows
        self._max_held = max(max_rows, max_held)
        self._held: dict[bytes, int] = {}  # numbers of rows, of those unused for longest first
        self._num_held = 0
        self._num_made = 0  # in the step that is planned
        self._in_step: set[bytes] = set()
        self._dropped: list[bytes] = []  # since the last plan
        self.num_queries = 0
        self.num_hits = 0

    def begin(self) -> None:
        """Begins to plan a step."""
        if self._in_step:
            self._num_made = 0
            self._in_step = set()

    def reach(self, items: Sequence[MediaItem], start: int, end: int) -> int:
        """Returns the position, `end` at most, up to which a step can compute a prompt's tokens from `start` on."""
        made, met = self._num_made, set()
        for item in items:
            first = item.first_row(start, end)
            if first is None or item.digest in self._held or item.digest in met:
                continue
            if made and made + item.num_rows > self._max_rows:
                return first
            made += item.num_rows
            met.add(item.digest)
        return end

    def take(
        self,
        items: Sequence[MediaItem],
        start: int,
        end: int,
        plan: StepPlan,
        in_use: Callable[[], set[bytes]],
    ) -> None:
        """Makes `plan` have the rows of a prompt's tokens from `start` to `end`.

        Args:
            in_use: finds the digests of items that running requests are in the midst of.
        """
        for item in items:
            if item.first_row(start, end) is None:
                continue
            self.num_queries += 1
            self._in_step.add(item.digest)
            num_rows = self._held.pop(item.digest, None)
            if num_rows is None:
                num_rows = item.num_rows
                self._num_made += num_rows
                self._num_held += num_rows
                plan.to_encode.append(item)
            else:
                self.num_hits += 1
            self._held[item.digest] = num_rows
        if self._num_held > self._max_held:
            self._make_room(plan, in_use())

    def _make_room(self, plan: StepPlan, in_use: set[bytes]) -> None:
        for digest in list(self._held):
            if self._num_held <= self._max_held:
                break
            if digest not in in_use and digest not in self._in_step:
                self._num_held -= self._held.pop(digest)
                plan.forgotten.append(digest)

    def reset(self, in_use: set[bytes]) -> None:
        """Drops all rows but those of items that running requests are in the midst of: the weights may be others."""
        for digest in [each for each in self._held if each not in in_use]:
            self._num_held -= self._held.pop(digest)
            self._dropped.append(digest)

    def take_dropped(self) -> list[bytes]:
        """Returns the items of `reset` for a plan; it forgets them first, and may make their rows again."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_invariants(self) -> None:
        """Asserts that the rows are counted."""
        assert self._num_held == sum(self._held.values()), "a tower's rows are miscounted"

"""The cost of drafts, as the engine's own steps show it: how much longer a step with drafts takes than one without."""

from typing import NamedTuple

NEWEST = 0.1
"""The weight of the newest step in a mean."""
_CLIP = 3.0
"""A step that takes longer than so many times the mean counts as this long: something else was the reason."""
_EXPECTED = ((0.0, 1.03), (4.0, 1.35))
"""(drafts of a row, time of the step over one without): what is expected before steps were measured."""
_WEIGHT = 0.5
"""The weight of each expectation, in steps."""


class _Line:
    """A line through measured points, the newest of which count most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Adds a point."""
        keep = 1 - NEWEST
        self._weight = keep * self._weight + 1
        self._x, self._y = keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    def fit(self) -> tuple[float, float]:
        """Returns (start, slope), with the expected points among the measured ones."""
        weight, sx, sy, sxx, sxy = self._weight, self._x, self._y, self._xx, self._xy
        for x, y in _EXPECTED:
            weight += _WEIGHT
            sx, sy = sx + _WEIGHT * x, sy + _WEIGHT * y
            sxx, sxy = sxx + _WEIGHT * x * x, sxy + _WEIGHT * x * y
        slope = max(0.0, (weight * sxy - sx * sy) / (weight * sxx - sx * sx))
        return max(1.0, (sy - slope * sx) / weight), slope


class Cost(NamedTuple):
    """The times of steps with so many rows, over that of one in which nobody asks for drafts.

    Attributes:
        asking: of one in which drafts are asked for, and none is checked.
        start: of one that checks drafts, but for
        slope: what a draft of each row adds.
    """

    asking: float
    start: float
    slope: float

    def of_step(self, share: float, num_drafts: float) -> float:
        """The expected time, if a share of steps checks drafts: over all steps, `num_drafts` of a row."""
        return self.asking + share * (self.start - self.asking) + self.slope * num_drafts


class DraftCosts:
    """The table: for each number of rows, rounded to a power of two, what `Cost` has."""

    def __init__(self) -> None:
        self._plain_seconds: dict[int, float] = {}
        self._asking: dict[int, float] = {}
        self._lines: dict[int, _Line] = {}

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """Takes in a step of decodes in which nobody asked for drafts."""
        size = num_rows.bit_length()
        before = self._plain_seconds.get(size, seconds)
        self._plain_seconds[size] = before + NEWEST * (min(seconds, _CLIP * before) - before)

    def add_asked(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Takes in a step of decodes after which drafts were asked for, and that checked `num_drafts`."""
        size = num_rows.bit_length()
        plain = self._plain_seconds.get(size)
        if not plain:
            return
        ratio = min(seconds / plain, _CLIP * (1 + num_drafts / num_rows))
        if num_drafts:
            self._lines.setdefault(size, _Line()).add(num_drafts / num_rows, ratio)
        else:
            before = self._asking.get(size, 1.0)
            self._asking[size] = before + NEWEST * (ratio - before)

    def of(self, num_rows: int) -> Cost:
        """The cost of steps with so many rows."""
        size = num_rows.bit_length()
        line = self._lines.get(size) or _Line()
        return Cost(max(1.0, self._asking.get(size, 1.0)), *line.fit())

"""The cost of drafts, as the engine's own steps show it: how much longer a step with drafts takes than one without."""

from typing import NamedTuple

NEWEST = 0.1
"""The weight of the newest step in the mean time of steps without drafts."""
ENOUGH = 3
"""Steps without drafts that are measured before any are made."""
_KEEP = 0.97
"""What a measured step with drafts still counts after the next one."""
_CLIP = 3.0
"""A step that takes longer than so many times what is expected counts as this long: something else was the reason."""
_FIRST, _FIRST_CLIP = 16, 1.3
"""The same for the first steps with drafts, which meet each number of tokens for the first time and run unrecorded."""


class Cost(NamedTuple):
    """The time of a step with drafts, over that of one in which nobody asks for any. It is 1, and more:

    Attributes:
        checking: if any drafts are checked, because no plan is then made ahead.
        draft: for each checked draft of a row, in the mean over all rows.
        asking: if drafts are asked for after all rows; in proportion for some.
    """

    checking: float
    draft: float
    asking: float

    def of_step(self, checks: float, num_drafts: float, asked: float) -> float:
        """The expected time.

        Args:
            checks: the probability that drafts are checked.
            num_drafts: checked ones, over the number of rows.
            asked: the share of rows after which drafts are asked for.
        """
        return 1 + self.checking * checks + self.draft * num_drafts + self.asking * asked


_EXPECTED = Cost(0.03, 0.08, 0.0)
_TRUST = Cost(4.0, 0.05, 0.005)
"""What is expected of each part before it was measured, and for how many steps that counts. Few drafts say little of
many, so what they cost is rather thought to be the drafts' own cost than that of checking any."""


class _Fit:
    """The cost of steps with about as many rows, by least squares over measured steps, the newest of which count most.

    It is solved when it is asked for after new measurements.

    Args:
        expected: before any.
    """

    def __init__(self, expected: Cost) -> None:
        self._expected = expected
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._num_steps = 0
        self._cost: Cost | None = None

    @property
    def cost(self) -> Cost:
        """The best fit; no part is negative."""
        if self._cost is None:
            rows = [[*products, total] for products, total in zip(self._products, self._sums, strict=True)]
            for place, (expected, trust) in enumerate(zip(self._expected, _TRUST, strict=True)):
                rows[place][place] += trust
                rows[place][3] += trust * expected
            self._cost = Cost(*(max(0.0, part) for part in _solved(rows)))
        return self._cost

    def add(self, num_drafts: float, asked: float, time: float) -> None:
        """Takes in a step; the arguments are as in `Cost.of_step`."""
        values = (float(num_drafts > 0), num_drafts, asked)
        expected = self.cost.of_step(*values)
        clip = _FIRST_CLIP if self._num_steps < _FIRST else _CLIP
        self._num_steps += num_drafts > 0
        beyond = min(time, clip * expected) - 1
        for row, value in enumerate(values):
            for column, other in enumerate(values):
                self._products[row][column] = _KEEP * self._products[row][column] + value * other
            self._sums[row] = _KEEP * self._sums[row] + value * beyond
        self._cost = None


def _solved(rows: list[list[float]]) -> list[float]:
    """The solution of equations whose matrix is symmetric and positive: rows of coefficients, with the right side."""
    for place, row in enumerate(rows):
        for other in rows[place + 1 :]:
            factor = other[place] / row[place]
            for column in range(place, len(row)):
                other[column] -= factor * row[column]
    found = [0.0] * len(rows)
    for place in reversed(range(len(rows))):
        known = sum(rows[place][later] * found[later] for later in range(place + 1, len(rows)))
        found[place] = (rows[place][-1] - known) / rows[place][place]
    return found


class DraftCosts:
    """The table: for each number of rows, rounded to a power of two, the time of a step and what drafts add to it."""

    def __init__(self) -> None:
        self._plain_seconds: dict[int, float] = {}
        self._num_plain: dict[int, int] = {}
        self._fits: dict[int, _Fit] = {}

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """Takes in a step of decodes in which nobody asked for drafts."""
        size = num_rows.bit_length()
        number = self._num_plain[size] = self._num_plain.get(size, 0) + 1
        before = self._plain_seconds.get(size, seconds)
        self._plain_seconds[size] = before + max(NEWEST, 1 / number) * (min(seconds, _CLIP * before) - before)

    def add(self, num_rows: int, num_drafts: int, num_asked: int, seconds: float) -> None:
        """Takes in a step of decodes that checked `num_drafts` drafts, and after which `num_asked` rows wanted some."""
        size = num_rows.bit_length()
        if plain := self._plain_seconds.get(size):
            if size not in self._fits:
                self._fits[size] = _Fit(self.of(num_rows))
            self._fits[size].add(num_drafts / num_rows, num_asked / num_rows, seconds / plain)

    def is_known(self, num_rows: int) -> bool:
        """Returns True if enough steps without drafts were measured."""
        return self._num_plain.get(num_rows.bit_length(), 0) >= ENOUGH

    def of(self, num_rows: int) -> Cost:
        """The cost of drafts in steps with so many rows; of the next known number, where nothing was measured."""
        size = num_rows.bit_length()
        nearest = min(self._fits, key=lambda known: abs(known - size), default=None)
        return _EXPECTED if nearest is None else self._fits[nearest].cost

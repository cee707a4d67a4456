"""How long steps of each size may take, as learned from the steps before.

A step's size is its tokens, and the pairs of a token and a position before it that attention computes. Sizes are told
apart by powers of two. A larger size takes at most as much longer as it has more of either, so a size that was never
seen has a bound as well.
"""

from typing import NamedTuple

LEAST_SECONDS = 1.0
LEAST_SECONDS_OF_HOSTS = 5.0
"""The least limit where ranks are on several hosts: the death of one, which is the better reason, is noticed in 3 s."""
FACTOR = 10.0
"""How much slower than the slowest recent step of its size a step may be."""
NEW_SIZE_SECONDS = 60.0
"""Least limit of the first steps of a size: kernels may be compiled, and launches recorded."""
NUM_FIRST_STEPS = 3
_FORGETTING = 0.98
"""The weight of what was slowest, after each later step of its size."""


class StepSize(NamedTuple):
    """Powers of two above a step's tokens, and above its pairs of a token and a position."""

    tokens: int
    pairs: int

    @classmethod
    def of(cls, num_tokens: int, num_pairs: int) -> "StepSize":
        """The size of a step with so many tokens and pairs."""
        return cls(num_tokens.bit_length(), num_pairs.bit_length())


class StepTimes:
    """The times of recent steps.

    Args:
        most_seconds: the limit of a step of which nothing is known, and of every other.
        fixed: `most_seconds` is the only limit.
        least_seconds: no limit is less.
    """

    def __init__(self, most_seconds: float, *, fixed: bool, least_seconds: float = LEAST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._fixed = fixed
        self._least_seconds = least_seconds
        self._slowest: dict[StepSize, float] = {}  # seconds of the slowest recent step
        self._numbers: dict[StepSize, int] = {}

    def add(self, size: StepSize, seconds: float) -> None:
        """Notes a step that is done."""
        self._slowest[size] = max(seconds, self._slowest.get(size, 0.0) * _FORGETTING)
        self._numbers[size] = self._numbers.get(size, 0) + 1

    def limit(self, size: StepSize) -> float:
        """The seconds that a step may take before it counts as hung."""
        if self._fixed or not self._slowest:
            return self._most_seconds
        if self._numbers.get(size, 0) >= NUM_FIRST_STEPS:
            limit = max(self._least_seconds, FACTOR * self._slowest[size])
        else:
            limit = max(NEW_SIZE_SECONDS, FACTOR * self._bound(size))
        return min(self._most_seconds, limit)

    def _bound(self, size: StepSize) -> float:
        """The longest time that follows from steps of other sizes."""
        return min(
            seconds * 2.0 ** max(0, size.tokens - known.tokens, size.pairs - known.pairs)
            for known, seconds in self._slowest.items()
        )

"""A histogram of plain counters, which the event loop increments without locks."""

import math
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket; `observe` takes a binary search and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as (upper bound, count), as Prometheus takes them."""
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            out.append(("+Inf" if bound == math.inf else str(float(bound)), total))
        return out

    @property
    def sum(self) -> float:
        return self._sum


def length_bounds(longest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `longest` tokens."""
    bounds, unit = [], 1
    while unit <= longest:
        bounds += [unit * step for step in (1, 2, 5) if unit * step <= longest]
        unit *= 10
    return bounds or [1]

"""Targets for Quire's figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """A limit, `≥` or `≤`, for the figure itself, or for its ratio to the figure of the engine `of`."""

    relation: Literal["≥", "≤"]
    limit: float
    of: str | None = None

    def reached(self, value: float) -> bool:
        """Returns True if `value`, the figure or the ratio, reaches the limit."""
        return value >= self.limit if self.relation == "≥" else value <= self.limit

    def mark(self, value: float) -> str:
        """The target, and whether `value` reaches it, as a text."""
        return f"{self.relation} {self.limit:g} {'✓' if self.reached(value) else '✗'}"


def at_least(limit: float, *of: str) -> tuple[Target, ...]:
    """Targets of at least `limit` times the figures of engines `of`; for the figure itself if none is named."""
    return tuple(Target("≥", limit, name) for name in of or (None,))


def at_most(limit: float, *of: str) -> tuple[Target, ...]:
    """Targets of at most `limit`; see `at_least`."""
    return tuple(Target("≤", limit, name) for name in of or (None,))


Targets = Mapping[str, tuple[Target, ...]]
"""Targets by metric."""

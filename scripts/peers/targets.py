"""What Quire's figures have to reach."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """At least or at most `limit`: of the figure itself, or of the ratio to the engine named in `of`."""

    relation: Literal["≥", "≤"]
    limit: float
    of: str | None = None

    def reached(self, value: float) -> bool:
        """`value` is the figure, or the ratio."""
        return value >= self.limit if self.relation == "≥" else value <= self.limit

    def mark(self, value: float) -> str:
        """The target beside a value, and whether it is reached."""
        return f"{self.relation} {self.limit:g} {'✓' if self.reached(value) else '✗'}"


def at_least(limit: float, *of: str) -> tuple[Target, ...]:
    """`limit` times each of these engines' figures; of the figure itself where none is named."""
    return tuple(Target("≥", limit, name) for name in of or (None,))


def at_most(limit: float, *of: str) -> tuple[Target, ...]:
    """As `at_least`."""
    return tuple(Target("≤", limit, name) for name in of or (None,))


Targets = Mapping[str, tuple[Target, ...]]
"""By metric."""

"""Numbers within a range, as types of plain flags. Options of Structs carry their ranges in annotations."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """Reads a number that is at least `minimum`, or above it with `is_open`."""

    kind: type[int] | type[float]
    minimum: float
    is_open: bool = False

    @property
    def metavar(self) -> str:
        """The placeholder for the value in help."""
        return "N" if self.kind is int else "X"

    def __call__(self, text: str) -> float:
        """The number in `text`. Raises ArgumentTypeError, which quotes the text."""
        try:
            number = self.kind(text)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"needs {what} (got {text!r})") from None
        if not (number > self.minimum if self.is_open else number >= self.minimum):
            bound = "above" if self.is_open else "at least"
            raise argparse.ArgumentTypeError(f"must be {bound} {self.minimum:g} (got {text!r})")
        return number


COUNT = Number(int, 1)
COUNT_OR_NONE = Number(int, 0)
POSITIVE = Number(float, 0, is_open=True)

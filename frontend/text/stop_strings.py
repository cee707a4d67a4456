"""Finds stop strings in a text that arrives in pieces, and keeps back what may be the beginning of one."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """The first stop string to be completed."""

    stop: str
    end: int  # characters of the piece just scanned, up to and including the match


class _Pattern:
    """Knuth, Morris and Pratt's automaton for one stop string: `matched` characters of it end the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)  # length of the longest proper border of stop[: i + 1]
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def find(self, text: str) -> int | None:
        """Advances over `text`. Returns the characters of it up to the first match's end, or None."""
        stop, fallback, matched = self.stop, self._fallback, self.matched
        position = 0
        while position < len(text):
            if not matched:  # the common case runs at the speed of str.find
                position = text.find(stop[0], position)
                if position < 0:
                    break
            while matched and text[position] != stop[matched]:
                matched = fallback[matched - 1]
            matched += text[position] == stop[matched]
            position += 1
            if matched == len(stop):
                self.matched = fallback[-1]
                return position
        self.matched = matched
        return None


class StopScanner:
    """Scans one completion's text for several stop strings.

    The result does not depend on how the text is cut into pieces: the stop string that is completed first wins, and
    among those completed by the same character the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]

    def scan(self, text: str) -> StopMatch | None:
        """Takes the next piece of text; after a match the scanner is spent."""
        best: StopMatch | None = None
        for pattern in self._patterns:
            end = pattern.find(text)
            if end is None:
                continue
            if best is None or (end, -len(pattern.stop)) < (best.end, -len(best.stop)):
                best = StopMatch(pattern.stop, end)
        return best

    def advance(self, text: str) -> None:
        """Takes the next piece of text without stopping at matches."""
        for pattern in self._patterns:
            position = 0
            while (end := pattern.find(text[position:])) is not None:
                position += end

    @property
    def held(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)

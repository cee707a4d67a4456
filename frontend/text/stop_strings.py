"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """The stop string that was completed first."""

    stop: str
    end: int  # index in the piece just scanned, after the match


class _Pattern:
    """The Knuth-Morris-Pratt automaton of one stop string; the text so far ends with its first `matched` characters."""

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
        """Advances over `text`. Returns the index after the first match, or None."""
        stop, fallback, matched = self.stop, self._fallback, self.matched
        position = 0
        while position < len(text):
            if not matched:  # the common case, as fast as str.find
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

    The first stop string to be completed is found. If one character completes several, the longest counts. So the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]

    def scan(self, text: str) -> StopMatch | None:
        """Takes the next piece of text. The scanner must not be used after a match."""
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
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        return max((pattern.matched for pattern in self._patterns), default=0)

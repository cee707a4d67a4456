"""Reads a text that arrives in pieces, so that a parser can be written as if the whole text were there.

A parser is a generator: it calls the steps below with `yield from`, and a bare `yield` inside them waits for more text.
Nothing is read twice, so the cost of a text is linear in its length however it is cut; and what a step returns never
depends on the cuts.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], None]

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is no call in this format. Never leaves the parsers: the text read for the call becomes content."""


class Markers:
    """Strings to look for, compiled once; of two that begin at one place, the longer counts.

    None may stand further inside another: what is found first would depend on how much has arrived.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(sorted(set(strings), key=len, reverse=True))
        for one in self.strings:
            if not one or any(one in other[1:] for other in self.strings):
                raise ValueError(f"Markers must not stand inside one another: {self.strings}.")
        self._pattern = re.compile("|".join(re.escape(string) for string in self.strings) or r"(?!)")
        self._firsts = frozenset(string[0] for string in self.strings)
        self._longest = max((len(string) for string in self.strings), default=0)

    def find(self, text: str, start: int, ended: bool) -> re.Match[str] | None:
        """The first marker in `text[start:]`, unless more text could make it a longer one."""
        match = self._pattern.search(text, start)
        if match and not ended and len(text) - match.start() < self._longest:
            rest = text[match.start() :]
            if any(len(string) > len(rest) and string.startswith(rest) for string in self.strings):
                return None
        return match

    def held_from(self, text: str, start: int) -> int:
        """Where a marker may begin that `text` does not complete; the text's length when none may."""
        for index in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[index] in self._firsts:
                tail = text[index:]
                if any(string.startswith(tail) for string in self.strings):
                    return index
        return len(text)


class Reader:
    """The text that has arrived and is not read yet; a record of what was read, while one is kept."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """More text has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will arrive."""
        self._ended = True

    # ------------------------------------------------------------------------------------------------------- record

    def start_record(self, text: str = "") -> None:
        """Keeps what is read from here on; `text` was read just before."""
        self._record = [text]

    def stop_record(self) -> str:
        """What was read since `start_record`, which ends with it; empty when no record is kept."""
        record, self._record = self._record, None
        return "".join(record) if record else ""

    # -------------------------------------------------------------------------------------------------------- steps

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; empty at the end of the text."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def char(self) -> Steps[str]:
        """The next character; empty at the end of the text."""
        char = yield from self.peek()
        return self._take(self._at + len(char))

    def space(self) -> Steps[str]:
        """White space, as much as there is; returns the character after it, unread."""
        while True:
            end = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches always
            self._take(end)
            if end < len(self._text):
                return self._text[end]
            if self._ended:
                return ""
            yield

    def accept(self, *options: str) -> Steps[str]:
        """Reads whichever option comes next, the longest of several; returns it, or nothing, having read nothing."""
        longest = max(map(len, options), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            if self._ended or not any(len(option) > len(rest) and option.startswith(rest) for option in options):
                break
            yield
        best = max((option for option in options if rest.startswith(option)), key=len, default="")
        return self._take(self._at + len(best))

    def expect(self, *options: str) -> Steps[str]:
        """As `accept`. Raises `Malformed` when none comes next."""
        found = yield from self.accept(*options)
        if not found:
            raise Malformed
        return found

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Hands on all characters that `pattern`, a repeated class of characters, matches from here."""
        while True:
            end = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches always
            if end > self._at:
                sink(self._take(end))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """All characters that `pattern` matches from here."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, sink: Sink, *, keep_partial: bool = True) -> Steps[str]:
        """Hands on the text before the next marker and reads that; returns it, or nothing at the end of the text.

        Where the text ends within what may be a marker, `keep_partial` says whether that is text.
        """
        while True:
            if match := markers.find(self._text, self._at, self._ended):
                if match.start() > self._at:
                    sink(self._take(match.start()))
                return self._take(match.end())
            keep_all = self._ended and keep_partial
            end = len(self._text) if keep_all else markers.held_from(self._text, self._at)
            if end > self._at:
                sink(self._take(end))
            if self._ended:
                self._take(len(self._text))
                return ""
            yield

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None and text:
            self._record.append(text)
        return text

"""Reads a text that arrives in pieces, so that a parser can be written as if the whole text were there.

A parser is a generator: it calls the steps below with `yield from`, and a bare `yield` inside them waits for more text.
Nothing is read twice, so the time for a text is linear in its length. Results do not depend on how the text is cut into
pieces.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], None]

TextEnd: TypeAlias = Literal["model", "stop", "limit"]
"""What ended a text: the model itself, a stop string of the client, or a limit, such as that of tokens."""

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not a call in this format. The parsers catch it, and the text that was read becomes content."""


class Markers:
    """Strings to search for, compiled once. If two begin at the same place, the longer one is found.

    A marker must not occur inside another, after its first character: the result would depend on the cuts.
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
        """The first marker in `text[start:]`; None if there is none, or if more text could make it a longer one."""
        match = self._pattern.search(text, start)
        if match and not ended and len(text) - match.start() < self._longest:
            rest = text[match.start() :]
            if any(len(string) > len(rest) and string.startswith(rest) for string in self.strings):
                return None
        return match

    def held_from(self, text: str, start: int) -> int:
        """The index of an incomplete marker at the end of `text`; the text's length if there is none."""
        for index in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[index] in self._firsts:
                tail = text[index:]
                if any(string.startswith(tail) for string in self.strings):
                    return index
        return len(text)


def _is_tag(partial: str) -> bool:
    return len(partial) > 2 and (not partial[0].isalnum() or "<" in partial)


class Reader:
    """The text that has arrived and is not read yet, and an optional record of the text that was read.

    Attributes:
        is_opaque: the text here is a value, in which nothing is a mark but its own end.
    """

    def __init__(self) -> None:
        self.is_opaque = False
        self._text = ""
        self._at = 0
        self._ended = False
        self._end: TextEnd = "model"
        self._cut_at: int | None = None  # where the text ends within an option
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """Adds text that has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, by: TextEnd) -> None:
        """Marks the end of the text."""
        self._ended = True
        self._end = by

    @property
    def is_at_end(self) -> bool:
        """True if the text ended here, or within an option that was to be accepted here."""
        return self._ended and self._at in (len(self._text), self._cut_at)

    @property
    def is_cut(self) -> bool:
        """True if a limit cut the text here, so that more would have followed."""
        return self._end == "limit" and self.is_at_end

    @property
    def is_interrupted(self) -> bool:
        """True if a limit or a stop string ended the text here."""
        return self._end != "model" and self.is_at_end

    @property
    def is_model_done(self) -> bool:
        """True if the model itself ended the text here."""
        return self._end == "model" and self.is_at_end

    # ------------------------------------------------------------------------------------------------------- record

    def start_record(self, text: str = "") -> None:
        """Starts a record of the text that is read. The record begins with `text`, which was read just before."""
        self._record = [text]

    def stop_record(self) -> str:
        """Ends the record, and returns the text read since `start_record`; "" if there is no record."""
        record, self._record = self._record, None
        return "".join(record) if record else ""

    # -------------------------------------------------------------------------------------------------------- steps

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; "" at the end of the text."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def char(self) -> Steps[str]:
        """Reads the next character; "" at the end of the text."""
        char = yield from self.peek()
        return self._take(self._at + len(char))

    def space(self) -> Steps[str]:
        """Reads white space; returns the character after it, which stays unread, or "" at the end of the text."""
        while True:
            end = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches always
            self._take(end)
            if end < len(self._text):
                return self._text[end]
            if self._ended:
                return ""
            yield

    def accept(self, *options: str) -> Steps[str]:
        """Reads the longest option that comes next, and returns it. If none does, reads nothing and returns ""."""
        longest = max(map(len, options), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            if self._ended or not any(len(option) > len(rest) and option.startswith(rest) for option in options):
                break
            yield
        best = max((option for option in options if rest.startswith(option)), key=len, default="")
        if not best and rest and any(option.startswith(rest) for option in options):
            self._cut_at = self._at
        return self._take(self._at + len(best))

    def expect(self, *options: str) -> Steps[str]:
        """Like `accept`, but raises `Malformed` if no option comes next."""
        found = yield from self.accept(*options)
        if not found:
            raise Malformed
        return found

    def leads_to(self, *options: str) -> Steps[bool]:
        """Finds whether an option comes next, or the end of the text. Reads nothing."""
        longest = max(map(len, options), default=1)
        while True:
            rest = self._text[self._at : self._at + longest]
            if rest.startswith(options) or self._ended:
                break
            if rest and not any(option.startswith(rest) for option in options):
                break
            yield
        return not rest or rest.startswith(options) or self._is_cut_off(rest, options)

    def closes(self, *followers: str) -> Steps[tuple[bool, str]]:
        """Checks if the mark that was just read closes a text: one of `followers`, or the end, must come next.

        Returns:
            True if it does, and the white space before the follower, which is read.
        """
        space = yield from self.word(_SPACE)
        return (yield from self.leads_to(*followers)), space

    def _is_cut_off(self, rest: str, options: Iterable[str]) -> bool:
        """True if a limit cut one of the options off."""
        return self._end == "limit" and any(option.startswith(rest) for option in options)

    def opaque(self, steps: Steps[T]) -> Steps[T]:
        """Runs steps that read a value."""
        self.is_opaque = True
        try:
            return (yield from steps)
        finally:
            self.is_opaque = False

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Passes on all characters that `pattern`, a repeated class of characters, matches from here."""
        while True:
            end = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches always
            if end > self._at:
                sink(self._take(end))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads all characters that `pattern` matches from here."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def ahead(self, pattern: re.Pattern[str]) -> Steps[str]:
        """All characters that `pattern` matches from here, and the one after them, which all stay unread."""
        while True:
            end = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches always
            if end < len(self._text) or self._ended:
                return self._text[self._at : end + 1]
            yield

    def until(self, markers: Markers, sink: Sink, *, keep_partial: bool = True, keep_tags: bool = True) -> Steps[str]:
        """Passes on the text before the next marker, and reads the marker. Returns it, or "" at the end of the text.

        Args:
            keep_partial: an incomplete marker at the end of the text is passed on, too.
            keep_tags: so is one that can only be a tag of a text that was cut: three characters or more that do not
                begin like a word.
        """
        while True:
            if match := markers.find(self._text, self._at, self._ended):
                if match.start() > self._at:
                    sink(self._take(match.start()))
                return self._take(match.end())
            end = markers.held_from(self._text, self._at)
            if self._ended and keep_partial and (keep_tags or self._end != "limit" or not _is_tag(self._text[end:])):
                end = len(self._text)
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

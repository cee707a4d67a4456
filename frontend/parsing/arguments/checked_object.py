"""Makes valid JSON of a call's arguments.

Valid JSON passes unchanged, as it grows. Slips are mended: a comma before a bracket, words of Python, raw line breaks
and false escapes in strings. After the first other mistake, the rest is dropped and the brackets are closed.
"""

import re

from quire.frontend.parsing.json_text import quote
from quire.frontend.parsing.literals import scalar_to_json
from quire.frontend.parsing.reader import Malformed, Sink

_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[\w.+\-]*")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACE = frozenset(" \t\r\n")
_CLOSING = {"{": "}", "[": "]"}


class CheckedObject:
    """Takes the text of an object in pieces, and writes JSON.

    Nothing is written before the object's first value, or its end.

    Attributes:
        is_broken: a mistake was found that cannot be mended.
        has_begun: something was written.
    """

    def __init__(self, write: Sink) -> None:
        self.is_broken = False
        self.has_begun = False
        self._write = write
        self._open: list[str] = []  # closing brackets of what is open
        self._next = "value"  # or "key", "colon", "item", or "separator"
        self._held = ""  # separators and a key, before the next value
        self._within = ""  # "key", "string" or "word"
        self._word = ""
        self._escape = ""  # an escape that is not whole

    def push(self, text: str) -> None:
        """Takes the next piece of text."""
        at = 0
        while at < len(text) and not self.is_broken:
            if self._escape:
                at += self._push_escaped(text[at])
            elif self._within == "word":
                at = self._push_word(text, at)
            elif self._within:
                at = self._push_string(text, at)
            else:
                self._push_structure(text[at])
                at += 1

    def close(self) -> None:
        """Ends the object: closes what is open."""
        if self._within == "word" and not self.is_broken:
            self._end_word()
        if self.has_begun:
            self._write(('"' if self._within == "string" else "") + "".join(reversed(self._open)))
        self._open.clear()

    # ----------------------------------------------------------------------------------------------------- structure

    def _emit(self, text: str) -> None:
        self.has_begun = True
        self._write(self._held + text)
        self._held = ""

    def _push_structure(self, char: str) -> None:
        if char in _SPACE:
            self._held += char
        elif self._next == "separator":
            self._push_separator(char)
        elif self._next == "colon":
            self._held += char
            self._next = "value"
            self.is_broken = char != ":"
        elif char in ("}", "]"):
            self._push_closing(char)
        elif char == '"':
            self._within = "key" if self._next == "key" else "string"
            if self._next == "key":
                self._held += char
            else:
                self._emit(char)
        elif self._next == "key":
            self.is_broken = True
        elif char in _CLOSING:
            self._push_opening(char)
        else:
            self._within, self._word = "word", char

    def _push_separator(self, char: str) -> None:
        if char in ("}", "]"):
            self._push_closing(char)
        elif char == "," and self._open:
            self._held += char
            self._next = "key" if self._open[-1] == "}" else "item"
        else:
            self.is_broken = True

    def _push_opening(self, char: str) -> None:
        if self._open:
            self._emit(char)
        else:
            self._held += char
        self._open.append(_CLOSING[char])
        self._next = "key" if char == "{" else "item"

    def _push_closing(self, char: str) -> None:
        if self._next == "value" or not self._open or self._open[-1] != char:
            self.is_broken = True
            return
        if self._held.lstrip().startswith(","):
            self._held = ""
        self._emit(self._open.pop())
        self._next = "separator"

    # -------------------------------------------------------------------------------------------------------- values

    def _push_word(self, text: str, at: int) -> int:
        match = _WORD.match(text, at)
        assert match is not None
        self._word += match[0]
        if match.end() < len(text):
            self._end_word()
        return match.end()

    def _end_word(self) -> None:
        self._within = ""
        try:
            self._emit(scalar_to_json(self._word))
        except Malformed:
            self.is_broken = True
        self._next = "separator"

    def _push_string(self, text: str, at: int) -> int:
        match = _STRING.match(text, at)
        assert match is not None
        self._put(match[0])
        if match.end() == len(text):
            return match.end()
        char = text[match.end()]
        if char == "\\":
            self._escape = char
        elif char == '"':
            self._put(char)
            self._next = "colon" if self._within == "key" else "separator"
            self._within = ""
        else:
            self._put(quote(char))
        return match.end() + 1

    def _push_escaped(self, char: str) -> int:
        """Takes the next character of an escape. Returns the number of characters that belong to it."""
        escape = self._escape + char
        is_unicode = escape.startswith("\\u")
        if is_unicode and char in ({"u"} if len(escape) == 2 else _HEX):
            self._escape = escape if len(escape) < 6 else ""
            if not self._escape:
                self._put(escape)
            return 1
        self._escape, started = "", self._escape
        if len(started) == 1 and char in _ESCAPES:
            self._put(escape)
            return 1
        if len(started) == 1 and char == "'":
            self._put(char)
            return 1
        self._put("\\" + started)
        return 0

    def _put(self, text: str) -> None:
        if self._within == "key":
            self._held += text
        elif text:
            self._emit(text)

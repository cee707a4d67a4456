"""Reads Python literals, and similar notations, that arrive in pieces, and writes them as JSON."""

import json
import math
import re
from typing import Protocol

from msgspec import Struct

from quire.frontend.parsing.json_text import quote
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps

_MAX_DEPTH = 64
_WORD = re.compile(r"[\w.+\-]*")
_BARE_WORD = re.compile(r"[^,{}\[\]<>\n]*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CLOSING = re.compile(r"[\s)\]}]*")
_AFTER_STRING = frozenset(",:<")
_END_OF_CALL = re.compile(r"[\s\]})]*\)\s*[\]\n]")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class Notation(Struct, frozen=True):
    """How strings are written.

    Attributes:
        quotes: markers that open and close a string.
        escapes: a backslash escapes a character, and three quotes open and close a string, too.
        bare_keys: an object's keys are written without quotes.
        bare_strings: a word that is no number, boolean or null is a string.
    """

    quotes: tuple[str, ...]
    escapes: bool
    bare_keys: bool
    bare_strings: bool = False


PYTHON = Notation(("'", '"'), escapes=True, bare_keys=False)
ESCAPED = Notation(("<escape>",), escapes=False, bare_keys=True)
GEMMA4 = Notation(('<|"|>',), escapes=False, bare_keys=True, bare_strings=True)


class Place(Protocol):
    """The place of a value in a schema."""

    @property
    def types(self) -> frozenset[str]:
        """The JSON types of the value; empty if the schema does not say."""

    def member(self, name: str) -> "Place":
        """The place of an object's member."""

    def item(self) -> "Place":
        """The place of a list's items."""

    def convert(self, text: str) -> str:
        """The text of a value as JSON of its types."""


def read_literal(
    reader: Reader, sink: Sink, notation: Notation, place: Place | None = None, depth: int = 0
) -> Steps[None]:
    """Passes on one literal as JSON.

    Args:
        place: gives strings and words their types; None goes by the literal alone.

    Raises:
        Malformed: there is no literal, or it is nested too deeply, or the text ends within it.
    """
    if depth > _MAX_DEPTH:
        raise Malformed
    char = yield from reader.space()
    if char == "[":
        yield from reader.char()
        sink("[")
        yield from _read_items(reader, sink, notation, place, depth, "]")
        sink("]")
    elif char == "(":
        yield from reader.char()
        pieces: list[str] = []
        count = yield from _read_items(reader, pieces.append, notation, place, depth, ")")
        text = "".join(pieces)
        sink(text if count == 1 else f"[{text}]")
    elif char == "{":
        yield from reader.char()
        if notation.bare_keys:
            sink("{")
            yield from _read_pairs(reader, sink, notation, place, depth, "")
        else:
            yield from _read_braces(reader, sink, notation, place, depth)
    elif opening := (yield from reader.accept(*notation.quotes)):
        if place is None or "string" in place.types or not place.types:
            yield from _read_string(reader, sink, notation, opening)
        else:
            string: list[str] = []
            yield from _read_string(reader, string.append, notation, opening)
            sink(place.convert(json.loads("".join(string))))
    else:
        word = (yield from reader.word(_BARE_WORD if notation.bare_strings else _WORD)).strip()
        if not word or not (yield from reader.peek()):  # the text ends, perhaps within the word
            raise Malformed
        sink(place.convert(word) if place is not None and place.types else _word_to_json(word, notation))


def _word_to_json(word: str, notation: Notation) -> str:
    try:
        return scalar_to_json(word)
    except Malformed:
        if notation.bare_strings:
            return f'"{quote(word)}"'
        raise


def scalar_to_json(word: str) -> str:
    """A number, boolean or null of Python's or JSON's as JSON. Raises `Malformed` if `word` is none of them."""
    if known := _WORDS.get(word):
        return known
    if _JSON_NUMBER.fullmatch(word):
        return word
    for base in (0, 10):  # 10: a number with leading zeros, such as a month
        try:
            return str(int(word, base))
        except ValueError:
            pass
    try:
        number = float(word)
    except ValueError:
        raise Malformed from None
    if not math.isfinite(number):
        raise Malformed
    return repr(number)


def literal_to_json(text: str) -> str | None:
    """A Python list, tuple or dictionary as JSON; None if `text` is none of them."""
    reader = Reader()
    pieces: list[str] = []
    reader.feed(text)
    reader.end("model")
    try:
        for _ in read_literal(reader, pieces.append, PYTHON):
            pass
    except Malformed:
        return None
    return "".join(pieces)


def _read_items(
    reader: Reader, sink: Sink, notation: Notation, place: Place | None, depth: int, closing: str
) -> Steps[int]:
    """Reads items with commas between them. Returns their number; 2 for one item and a comma in a tuple."""
    count = 0
    while (yield from reader.space()) != closing:
        if count:
            sink(", ")
        yield from read_literal(reader, sink, notation, place.item() if place else None, depth + 1)
        count += 1
        if (yield from reader.space()) == closing:
            break
        yield from reader.expect(",")
        if count == 1 and closing == ")" and (yield from reader.space()) == closing:
            count = 2
    yield from reader.char()
    return count


def _read_braces(reader: Reader, sink: Sink, notation: Notation, place: Place | None, depth: int) -> Steps[None]:
    """Reads a dictionary or a set, after its opening brace. A set becomes a list."""
    first: list[str] = []
    if (yield from reader.space()) != "}":
        yield from read_literal(reader, first.append, notation, None, depth + 1)
    if not first or (yield from reader.space()) in (":", ""):
        sink("{")
        yield from _read_pairs(reader, sink, notation, place, depth, "".join(first))
        return
    sink("[" + "".join(first))
    if (yield from reader.expect(",", "}")) == ",":
        items: list[str] = []
        if (yield from _read_items(reader, items.append, notation, None, depth, "}")):
            sink(", " + "".join(items))
    sink("]")


def _read_pairs(
    reader: Reader, sink: Sink, notation: Notation, place: Place | None, depth: int, key: str
) -> Steps[None]:
    """Reads the pairs of a dictionary, and its closing brace. `key` is the first key if it was read, as JSON.

    The first of two pairs with one key counts, because clients have it.
    """
    keys: set[str] = set()
    while key or (yield from reader.space()) != "}":
        written: list[str] = []
        yield from _read_key(reader, written.append, notation, key)
        key = ""
        yield from reader.space()
        yield from reader.expect(":")
        name = json.loads("".join(written))
        value: Sink = sink
        if name in keys:
            value = _drop
        else:
            sink(f"{', ' if keys else ''}{''.join(written)}: ")
        keys.add(name)
        yield from read_literal(reader, value, notation, place.member(name) if place else None, depth + 1)
        if (yield from reader.space()) != "}":
            yield from reader.expect(",")
    yield from reader.char()
    sink("}")


def _drop(text: str) -> None:
    """Takes the value of a key that is written twice."""


def _read_key(reader: Reader, sink: Sink, notation: Notation, key: str) -> Steps[None]:
    """Passes on a key. `key` is the key if it was read, as JSON."""
    if key:
        sink(key if key.startswith('"') else f'"{quote(key)}"')
    elif opening := (yield from reader.accept(*notation.quotes)):
        yield from _read_string(reader, sink, notation, opening)
    else:
        word = yield from reader.word(_WORD)
        if not word or (yield from reader.space()) != ":":
            raise Malformed
        sink(f'"{quote(word if notation.bare_keys else scalar_to_json(word))}"')


def _read_string(reader: Reader, sink: Sink, notation: Notation, opening: str) -> Steps[None]:
    """Reads a string, after its opening quote."""
    yield from reader.opaque(_read_characters(reader, sink, notation, opening))


def _read_characters(reader: Reader, sink: Sink, notation: Notation, opening: str) -> Steps[None]:
    if notation.escapes and (yield from reader.accept(opening)):
        if not (yield from reader.accept(opening)):
            sink('""')
            return
        opening *= 3
    sink('"')
    markers = Markers((opening, "\\") if notation.escapes else (opening,))
    while found := (yield from reader.until(markers, lambda text: sink(quote(text)), keep_partial=False)):
        if found != opening:
            yield from _read_escape(reader, sink)
        elif notation.escapes and len(opening) == 1 and not (yield from _closes_string(reader)):
            sink(quote(opening))  # a quote that the model forgot to escape
        else:
            sink('"')
            return
    raise Malformed


def _closes_string(reader: Reader) -> Steps[bool]:
    """Finds whether the quote that was just read closes its string: only brackets, separators or the end may follow."""
    text = yield from reader.ahead(_CLOSING)
    return text[-1:] in _AFTER_STRING or _END_OF_CALL.match(text) is not None or _CLOSING.fullmatch(text) is not None


def _read_escape(reader: Reader, sink: Sink) -> Steps[None]:
    """Reads an escape, after its backslash."""
    char = yield from reader.char()
    if digits := _HEX_DIGITS.get(char):
        code = ""
        for _ in range(digits):
            code += yield from reader.char()
        try:
            number = int(code, 16)
            sink(f"\\u{number:04x}" if number < 0x10000 else quote(chr(number)))
        except (ValueError, OverflowError):
            raise Malformed from None
    elif char in _CONTROLS:
        sink(quote(_CONTROLS[char]))
    elif char in ("\\", "'", '"'):
        sink(quote(char))
    elif char:
        sink(quote("\\" + char))
    else:
        raise Malformed

"""Reads JSON that arrives in pieces: finds the ends of values, and passes their text on unchanged."""

import json
import re
from collections.abc import Callable

from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps

_PLAIN = re.compile(r'[^"{}\[\]<]*')  # outside of strings; "<" is not JSON and may begin a marker
_SCALAR = re.compile(r"[\w.+\-]*")
_STRING = re.compile(r'[^"\\]*')
_NO_MARKERS = Markers(())
_OPENING = frozenset("{[")
_CLOSING = frozenset("}]")


def quote(text: str) -> str:
    """`text` escaped for a JSON string. Quoted pieces, joined, are the quoted whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_string(reader: Reader, sink: Sink) -> Steps[None]:
    """Passes on a JSON string with its quotes. Raises `Malformed` if it does not end."""
    sink((yield from reader.expect('"')))
    yield from reader.opaque(read_rest_of_string(reader, sink))


def read_rest_of_string(reader: Reader, sink: Sink) -> Steps[None]:
    """Passes on a JSON string after its opening quote. Raises `Malformed` if it does not end."""
    while True:
        yield from reader.run(_STRING, sink)
        char = yield from reader.char()
        if not char:
            raise Malformed
        sink(char)
        if char == '"':
            return
        sink((yield from reader.char()))  # the escaped character


def read_text(reader: Reader) -> Steps[str]:
    """Reads a JSON string; returns its decoded text."""
    pieces: list[str] = []
    yield from read_string(reader, pieces.append)
    return decode_string("".join(pieces))


def decode_string(literal: str) -> str:
    """The decoded text of a JSON string, which may contain unescaped control characters."""
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        raise Malformed from None


def read_value(
    reader: Reader, sink: Sink, end: Markers = _NO_MARKERS, ended: Callable[[], None] | None = None
) -> Steps[bool]:
    """Passes on one JSON value: brackets are counted, the rest is not checked.

    Args:
        ended: called if a marker of `end` ends the value.

    Returns:
        True if the value is complete; False if the text, or a marker of `end` (which is read), ended it.
    """
    first = yield from reader.peek()
    if first == '"':
        yield from read_string(reader, sink)
        return True
    if first not in _OPENING:
        word = yield from reader.word(_SCALAR)
        if not word:
            raise Malformed
        sink(word)
        return True
    sink((yield from reader.char()))
    return (yield from read_rest(reader, sink, end, ended))


def read_rest(
    reader: Reader, sink: Sink, end: Markers = _NO_MARKERS, ended: Callable[[], None] | None = None
) -> Steps[bool]:
    """Passes on the rest of an object or array after its opening bracket. Returns like `read_value`."""
    depth = 1
    while depth:
        yield from reader.run(_PLAIN, sink)
        char = yield from reader.peek()
        if not char:
            return False
        if char == '"':
            try:
                yield from read_string(reader, sink)
            except Malformed:
                return False
            continue
        if char == "<" and end.strings:
            if (yield from reader.accept(*end.strings)):
                if ended is not None:
                    ended()
                return False
            if reader.is_at_end:
                return False
        sink((yield from reader.char()))
        depth += (char in _OPENING) - (char in _CLOSING)
    return True


def is_object(text: str) -> bool:
    """True if `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

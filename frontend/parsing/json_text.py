"""JSON read in pieces: finds where values end, and passes their text on as it is."""

import json
import re

from quire.frontend.parsing.reader import Malformed, Markers, Reader, Sink, Steps

_PLAIN = re.compile(r'[^"{}\[\]<]*')  # outside strings; "<" may begin a marker, and is no JSON
_SCALAR = re.compile(r"[\w.+\-]*")
_STRING = re.compile(r'[^"\\]*')
_NO_MARKERS = Markers(())
_OPENING = frozenset("{[")
_CLOSING = frozenset("}]")


def quote(text: str) -> str:
    """`text` as the inside of a JSON string: quoted pieces join up to the quoted whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_string(reader: Reader, sink: Sink) -> Steps[None]:
    """Hands on a JSON string with its quotes. Raises `Malformed` when it does not end."""
    sink((yield from reader.expect('"')))
    while True:
        yield from reader.run(_STRING, sink)
        char = yield from reader.char()
        if not char:
            raise Malformed
        sink(char)
        if char == '"':
            return
        sink((yield from reader.char()))  # what a backslash escapes


def read_text(reader: Reader) -> Steps[str]:
    """The text that a JSON string stands for."""
    pieces: list[str] = []
    yield from read_string(reader, pieces.append)
    return decode_string("".join(pieces))


def decode_string(literal: str) -> str:
    """The text that a JSON string stands for; control characters may stand in it unescaped."""
    try:
        return str(json.loads(literal, strict=False))
    except ValueError:
        raise Malformed from None


def read_value(reader: Reader, sink: Sink, end: Markers = _NO_MARKERS) -> Steps[bool]:
    """Hands on one JSON value: its brackets are counted, the rest is not judged.

    Returns:
        True when the value is complete; False when the text ended within it or a marker of `end` came, which is read.
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
    return (yield from read_rest(reader, sink, end))


def read_rest(reader: Reader, sink: Sink, end: Markers = _NO_MARKERS) -> Steps[bool]:
    """Hands on the rest of an object or array whose opening bracket was read. Returns as `read_value`."""
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
        if char == "<" and end.strings and (yield from reader.accept(*end.strings)):
            return False
        sink((yield from reader.char()))
        depth += (char in _OPENING) - (char in _CLOSING)
    return True


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

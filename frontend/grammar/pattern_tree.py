"""Trees of regular expressions: the texts that a tree describes, and their lengths."""

from collections.abc import Iterable
from enum import Enum
from itertools import product
from typing import NamedTuple

from quire.frontend.grammar.characters import ALL, has

MAX_REPEATS = 100_000
"""The highest limit of a repetition."""


class Anchor(Enum):
    """A place in the text."""

    START = "^"
    END = "$"


class Chars(NamedTuple):
    """One character of a set, which is not empty."""

    ranges: tuple[tuple[int, int], ...]


class Sequence(NamedTuple):
    """One part after the other."""

    parts: tuple["Node", ...]


class Either(NamedTuple):
    """One of several parts."""

    ways: tuple["Node", ...]


class Repeat(NamedTuple):
    """A part several times; `most` is None where there is no limit."""

    part: "Node"
    least: int
    most: int | None


Node = Anchor | Chars | Sequence | Either | Repeat

EMPTY = Sequence(())
ANY_TEXT = Repeat(Chars(tuple(ALL)), 0, None)


def either(ways: Iterable[Node]) -> Node:
    ways = tuple(dict.fromkeys(ways))
    return ways[0] if len(ways) == 1 else Either(ways)


def is_any_text(node: Node) -> bool:
    """True if a tree certainly describes all texts."""
    return node == ANY_TEXT or (isinstance(node, Either) and any(map(is_any_text, node.ways)))


def matches(node: Node, text: str) -> bool:
    """True if a tree without anchors describes the text. No pattern takes long, unlike in Python's `re`."""
    return len(text) in _ends(node, text, {0})


def _ends(node: Node, text: str, starts: set[int]) -> set[int]:
    """The places in a text where a part may end that begins at one of `starts`."""
    match node:
        case Chars(ranges):
            return {at + 1 for at in starts if at < len(text) and has(ranges, ord(text[at]))}
        case Sequence(parts):
            for part in parts:
                starts = _ends(part, text, starts)
            return starts
        case Either(ways):
            return {end for way in ways for end in _ends(way, text, starts)}
        case Repeat(part, least, most):
            found = set(starts) if least == 0 else set()
            for count in range(1, (most or MAX_REPEATS) + 1):
                before, starts = starts, _ends(part, text, starts)
                found |= starts if count >= least else set()
                if not starts or starts == before:  # further repetitions add nothing
                    found |= starts
                    break
            return found
    return set()


def texts_of(node: Node, limit: int) -> list[str] | None:
    """All texts that a tree without anchors describes; None if there are more than `limit`."""
    match node:
        case Chars(ranges):
            if sum(high - low + 1 for low, high in ranges) > limit:
                return None
            return [chr(code) for low, high in ranges for code in range(low, high + 1)]
        case Sequence(parts):
            return _joined([texts_of(part, limit) for part in parts], limit)
        case Either(ways):
            found = [texts_of(way, limit) for way in ways]
            texts = list(dict.fromkeys(text for each in found if each is not None for text in each))
            return None if None in found or len(texts) > limit else texts
        case Repeat(part, least, most) if most is not None and most <= limit:
            once = texts_of(part, limit)
            times = [_joined([once] * count, limit) for count in range(least, most + 1)]
            texts = list(dict.fromkeys(text for each in times if each is not None for text in each))
            return None if None in times or len(texts) > limit else texts
    return None


def _joined(parts: list[list[str] | None], limit: int) -> list[str] | None:
    texts = [""]
    for part in parts:
        if part is None or len(texts) * len(part) > limit:
            return None
        texts = [before + after for before, after in product(texts, part)]
    return texts


def longest(node: Node) -> int | None:
    """The characters of the longest text that a tree without anchors describes; None without a limit."""
    match node:
        case Chars():
            return 1
        case Sequence(parts) | Either(parts):
            lengths = [longest(part) for part in parts]
            if None in lengths:
                return None
            return (sum if isinstance(node, Sequence) else max)(length for length in lengths if length is not None)
        case Repeat(part, _, most):
            length = longest(part)
            if length == 0 or most == 0:
                return 0
            return None if length is None or most is None else length * most
    return 0

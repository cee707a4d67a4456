"""Regular expressions of JSON schemas (ECMA 262), read into a tree, and what it means to be found in a text.

Libraries differ in their dialects, and some match a pattern with the whole string. A tree without anchors can be
written in the notation of each (`pattern_notations.py`).
"""

from collections.abc import Iterable
from enum import Enum
from itertools import product
from typing import NamedTuple

from quire.frontend.grammar.characters import ALL, Ranges, common, complement, has, union

MAX_CHARACTERS = 16_384
MAX_REPEATS = 100_000
_MAX_DEPTH = 60
_MAX_BRANCHES = 64
"""Parts that differ in their anchors, as in `^a|b$`."""

_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_LINE_ENDS: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_SPACE: Ranges = [
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD, "0": 0}


class PatternError(ValueError):
    """The pattern is malformed, or more than a regular expression. The message names the place."""


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


def read_pattern(pattern: str) -> Node:
    """The texts in which `pattern` is found, as a tree without anchors: it describes whole texts.

    Raises:
        PatternError: the pattern is malformed, looks around, refers back, or has anchors that cannot be resolved.
    """
    return _either(_found(*branch) for branch in _branches(pattern))


def is_anchored(pattern: str) -> bool:
    """Whether a pattern is found in a text only as the whole text.

    Raises:
        PatternError: as for `read_pattern`.
    """
    return all(at_start and at_end for at_start, at_end, _ in _branches(pattern))


def is_any_text(node: Node) -> bool:
    """Whether a tree surely describes all texts."""
    return node == ANY_TEXT or (isinstance(node, Either) and any(map(is_any_text, node.ways)))


def matches(node: Node, text: str) -> bool:
    """Whether a tree without anchors describes the text. No pattern takes long, unlike in Python's `re`."""
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
                if not starts or starts == before:  # as for all further repetitions
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


# ----------------------------------------------------------------------------------------------------------- anchors


def _branches(pattern: str) -> list[tuple[bool, bool, Node]]:
    """Parts without anchors, one of which is to be found: at the text's start, at its end, or anywhere."""
    branches = []
    for at_start, body in _split(_Reader(pattern).read(), Anchor.START):
        branches += [(at_start, at_end, rest) for at_end, rest in _split(body, Anchor.END)]
    if len(branches) > _MAX_BRANCHES or any(_has_anchors(body) for _, _, body in branches):
        raise PatternError("the pattern has ^ or $ where they cannot be followed")
    return branches


def _found(at_start: bool, at_end: bool, body: Node) -> Node:
    if not at_start and not at_end and _may_be_empty(body):
        return ANY_TEXT
    before, after = () if at_start else (ANY_TEXT,), () if at_end else (ANY_TEXT,)
    return Sequence((*before, body, *after)) if before or after else body


def _split(node: Node, anchor: Anchor) -> list[tuple[bool, Node]]:
    """A union that `node` equals: whether the anchor must hold there, and the rest without it."""
    if node is anchor:
        return [(True, EMPTY)]
    if not _has_anchors(node):
        return [(False, node)]
    match node:
        case Either(ways):
            return _bounded([branch for way in ways for branch in _split(way, anchor)])
        case Sequence(parts):
            head, rest = (parts[0], parts[1:]) if anchor is Anchor.START else (parts[-1], parts[:-1])
            out = []
            for is_anchored, body in _split(head, anchor):
                if body == EMPTY:
                    out += [(is_anchored or also, tail) for also, tail in _split(Sequence(rest), anchor)]
                else:
                    out.append((is_anchored, Sequence((body, *rest) if anchor is Anchor.START else (*rest, body))))
            return _bounded(out)
    return [(False, node)]


def _bounded(branches: list[tuple[bool, Node]]) -> list[tuple[bool, Node]]:
    if len(branches) > _MAX_BRANCHES:
        raise PatternError("the pattern has ^ or $ in too many places")
    return branches


def _has_anchors(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Sequence(parts) | Either(parts):
            return any(map(_has_anchors, parts))
        case Repeat(part):
            return _has_anchors(part)
    return False


def _may_be_empty(node: Node) -> bool:
    match node:
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Either(ways):
            return any(map(_may_be_empty, ways))
        case Repeat(part, least):
            return least == 0 or _may_be_empty(part)
    return False


def _either(ways: Iterable[Node]) -> Node:
    ways = tuple(dict.fromkeys(ways))
    return ways[0] if len(ways) == 1 else Either(ways)


# ----------------------------------------------------------------------------------------------------------- reading


class _Reader:
    """Reads one pattern, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        if len(self._text) > MAX_CHARACTERS:
            raise PatternError(f"the pattern has more than {MAX_CHARACTERS} characters")
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("an unmatched )")
        return node

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("too many groups within groups")
        ways = [self._terms()]
        while self._skip("|"):
            ways.append(self._terms())
        self._depth -= 1
        return _either(ways)

    def _terms(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _term(self) -> Node:
        atom = self._atom()
        if isinstance(atom, Anchor) or (count := self._count()) is None:
            return atom
        if self._at < len(self._text) and self._text[self._at] in "*+":
            raise self._error("a repetition of a repetition")
        return Repeat(atom, *count)

    def _count(self) -> tuple[int, int | None] | None:
        """A quantifier; a lazy one describes the same texts."""
        count = next((each for mark, each in _QUANTIFIERS.items() if self._skip(mark)), None) or self._braces()
        if count is not None:
            self._skip("?")
        return count

    def _braces(self) -> tuple[int, int | None] | None:
        """`{2}`, `{2,}` or `{2,5}`; any other brace stands for itself."""
        start = self._at
        if not self._skip("{"):
            return None
        least, has_comma = self._digits(), self._skip(",")
        most = self._digits() if has_comma else least
        if not self._skip("}") or (least == "" and most == ""):
            self._at = start
            return None
        if least == "" or max(len(least), len(most)) > 6:
            raise self._error("a repetition without a lower limit, or with too high a limit")
        low, high = int(least), int(most) if most else None
        if low > MAX_REPEATS or (high is not None and not low <= high <= MAX_REPEATS):
            raise self._error(f"a repetition with limits that are out of order, or over {MAX_REPEATS}")
        return low, high

    def _digits(self) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        return self._text[start : self._at]

    def _atom(self) -> Node:
        character = self._next()
        match character:
            case "^" | "$":
                return Anchor(character)
            case ".":
                return _chars(complement(_LINE_ENDS))
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._error(f"{character} with nothing before it")
            case "{":  # nothing is before it: a brace that stands for itself, or a mistake
                self._at -= 1
                if self._braces() is not None:
                    raise self._error("a repetition with nothing before it")
                self._at += 1
        return _chars([(ord(character), ord(character))])

    def _group(self) -> Node:
        if self._skip("?") and not self._skip(":"):
            self._skip("P")
            name = self._text[self._at :].partition(">")[0] if self._skip("<") else ""
            if not name.isidentifier():
                raise self._error("a group that looks around, or has flags")
            self._at += len(name) + 1
        node = self._alternatives()
        if not self._skip(")"):
            raise self._error("an unmatched (")
        return node

    def _escape(self) -> Node:
        character = self._next()
        if character in "AZz":  # Python's; ECMA 262 has no such escapes
            return Anchor.START if character == "A" else Anchor.END
        self._at -= 1
        return _chars(self._escaped())

    def _escaped(self) -> Ranges:
        """What follows a backslash, in a class or not."""
        character = self._next()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else complement(ranges)
        if character in _CONTROLS:
            if character == "0" and self._digits():
                raise self._error("an octal escape")
            return [(_CONTROLS[character],) * 2]
        if character == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise self._error("\\c without a letter")
            return [(ord(letter) % 32,) * 2]
        if character in "xu":
            return [(self._code(2 if character == "x" else 4),) * 2]
        if character.isalnum():
            raise self._error(f"\\{character}, which is not supported")
        return [(ord(character),) * 2]

    def _code(self, num_digits: int) -> int:
        """A code point in hexadecimal digits, in braces or not, or in two escapes for its surrogates."""
        if num_digits == 4 and self._skip("{"):
            digits, _, _ = self._text[self._at :].partition("}")
            self._at += len(digits) + 1
        else:
            digits = self._text[self._at : self._at + num_digits]
            self._at += num_digits
            if len(digits) < num_digits:
                digits = ""
        if not digits or len(digits) > 6 or set(digits) - set("0123456789abcdefABCDEF"):
            raise self._error("an escape without its hexadecimal digits")
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and self._skip("\\u"):
            low = self._code(4)
            if not 0xDC00 <= low < 0xE000:
                raise self._error("half a surrogate pair")
            return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
        return code

    def _class(self) -> Node:
        is_negated = self._skip("^")
        ranges: Ranges = []
        while not self._skip("]"):
            low = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or low[0][0] > high[0][1]:
                    raise self._error("a range whose ends are not in order")
                ranges.append((low[0][0], high[0][1]))
            else:
                ranges += low
        return _chars(complement(ranges) if is_negated else ranges)

    def _member(self) -> Ranges:
        character = self._next()
        if character != "\\":
            return [(ord(character),) * 2]
        return [(0x8, 0x8)] if self._skip("b") else self._escaped()

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._error("an end where more is needed")
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _error(self, what: str) -> PatternError:
        return PatternError(f"the pattern has {what}, at character {self._at}")


_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def _chars(ranges: Ranges) -> Chars:
    kept = common(union(ranges), ALL)
    if not kept:
        raise PatternError("the pattern has a class without characters")
    return Chars(tuple(kept))

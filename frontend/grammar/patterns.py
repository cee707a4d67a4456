"""Patterns of JSON schemas as trees without anchors, which describe whole texts.

Libraries differ in their dialects, and some match a pattern with the whole string. A tree without anchors can be
written in the notation of each (`pattern_notations.py`).
"""

from quire.frontend.grammar.pattern_reader import PatternError, PatternReader
from quire.frontend.grammar.pattern_tree import ANY_TEXT, EMPTY, Anchor, Either, Node, Repeat, Sequence, either

_MAX_BRANCHES = 64
"""Parts that differ in their anchors, as in `^a|b$`."""


def read_pattern(pattern: str) -> Node:
    """The texts in which `pattern` is found, as a tree without anchors: it describes whole texts.

    Raises:
        PatternError: the pattern is malformed, looks around, refers back, or has anchors that cannot be resolved.
    """
    return either(_found(*branch) for branch in _branches(pattern))


def is_anchored(pattern: str) -> bool:
    """True if a pattern is found in a text only as the whole text.

    Raises:
        PatternError: as for `read_pattern`.
    """
    return all(at_start and at_end for at_start, at_end, _ in _branches(pattern))


def _branches(pattern: str) -> list[tuple[bool, bool, Node]]:
    """Alternatives without anchors, each with flags: it must begin at the text's start, it must end at its end."""
    branches = []
    for at_start, body in _split(PatternReader(pattern).read(), Anchor.START):
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
    """An equivalent union. Each branch has a flag, true if the anchor must hold there, and the rest without it."""
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

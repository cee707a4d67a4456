"""Patterns of schemas written for a library: as expressions of whole strings, or of their JSON."""

from collections.abc import Callable
from typing import Any

from quire.frontend.grammar.characters import PLAIN, Ranges, by_encoded_length, common, has, in_json, union
from quire.frontend.grammar.pattern_reader import PatternError
from quire.frontend.grammar.pattern_tree import (
    Chars,
    Either,
    Node,
    Repeat,
    Sequence,
    is_any_text,
    matches,
    texts_of,
)
from quire.frontend.grammar.patterns import read_pattern
from quire.frontend.grammar.schema import walk

_SPECIAL = set("\\.+*?()|[]{}^$-&~#/")


def is_plain(node: Node) -> bool:
    """True if JSON writes each of the characters without an escape."""
    match node:
        case Chars(ranges):
            return sum(high - low + 1 for low, high in common(list(ranges), PLAIN)) == sum(
                high - low + 1 for low, high in ranges
            )
        case Sequence(parts) | Either(parts):
            return all(map(is_plain, parts))
        case Repeat(part):
            return is_plain(part)
    return True


def is_readable(pattern: str) -> bool:
    """True if a pattern is a regular expression that can be written for each library."""
    return _tree(pattern) is not None


def whole_regex(pattern: str) -> str | None:
    """A pattern that a whole string matches, and no part of it; None if the pattern cannot be read."""
    return _whole(_tree(pattern), as_regex)


def plain_regex(pattern: str) -> str | None:
    """As `whole_regex`, for strings that JSON writes as they are; None if the pattern allows others."""
    node = _tree(pattern)
    return _whole(node if node is not None and is_plain(node) else None, as_regex)


def json_regex(pattern: str) -> str | None:
    """As `whole_regex`, for strings as JSON writes them, without quotes."""
    return _whole(_tree(pattern), as_json_regex)


def guidance_regex(pattern: str) -> str | None:
    """As `whole_regex`, for llguidance, which escapes characters for JSON by itself."""
    return _whole(_tree(pattern), lambda node: _written(node, _without_all_controls))


def _without_all_controls(ranges: Ranges) -> str:
    """A class for llguidance 1.9: with all characters below U+0020 in a class, quotes and backslashes would match, too.

    So such a class lacks the last of them, unless it has quotes and backslashes anyway.
    """
    is_affected = has(union(ranges)[:1], 0) and union(ranges)[0][1] >= 0x1F
    if is_affected and not (has(ranges, ord('"')) and has(ranges, ord("\\"))):
        ranges = common(ranges, [(0, 0x1E), (0x20, 0x10FFFF)])
    return _one_of(ranges)


def _tree(pattern: str) -> Node | None:
    try:
        return read_pattern(pattern)
    except PatternError:
        return None


def _whole(node: Node | None, write: Callable[[Node], str]) -> str | None:
    if node is None:
        return None
    return f"^{_group(node, write) if isinstance(node, Either) else write(node)}$"


def as_regex(node: Node) -> str:
    """A regular expression of the texts, in the common part of the libraries' dialects."""
    return _written(node, _by_encoded_length)


def as_json_regex(node: Node) -> str:
    """A regular expression of the texts as JSON writes them, without quotes."""
    return _written(node, lambda ranges: in_json(ranges, _by_encoded_length, lambda text: "".join(map(_literal, text))))


def _by_encoded_length(ranges: Ranges) -> str:
    """A class for the characters of each length in UTF-8.

    In a class of several lengths, XGrammar's `Regex` allows encodings that are longer than UTF-8's.
    """
    classes = [_one_of(part) for part in by_encoded_length(ranges)]
    return classes[0] if len(classes) == 1 else f"({'|'.join(classes)})"


def finds(pattern: str, text: str) -> bool | None:
    """True if a pattern is found in a text; None if the pattern cannot be read."""
    node = _tree(pattern)
    return None if node is None else matches(node, text)


def names_of(pattern: str, limit: int) -> list[str] | None:
    """All texts that a pattern allows; None if it cannot be read or allows more than `limit`."""
    node = _tree(pattern)
    return None if node is None else texts_of(node, limit)


def finds_all(pattern: str) -> bool:
    """True if a pattern is certainly found in every text."""
    node = _tree(pattern)
    return node is not None and is_any_text(node)


def write_lengths(schema: Any, characters: str = "[\\s\\S]") -> Any:
    """Writes `minLength` and `maxLength` as patterns, in place, where a schema has no pattern.

    Args:
        characters: the class of the characters that a string may have.
    """
    for node in walk(schema):
        if (
            isinstance(node, dict)
            and any(word in node for word in ("minLength", "maxLength"))
            and "pattern" not in node
        ):
            least, most = node.pop("minLength", None) or 0, node.pop("maxLength", None)
            node["pattern"] = f"^{characters}{{{least},{'' if most is None else most}}}$"
    return schema


def rewrite_patterns(schema: Any, rewrite: Callable[[str], str | None]) -> Any:
    """Rewrites each pattern of a schema, keys of patternProperties included, in place; None leaves a pattern."""
    for node in walk(schema):
        if not isinstance(node, dict):
            continue
        if isinstance(node.get("pattern"), str):
            node["pattern"] = rewrite(node["pattern"]) or node["pattern"]
        if isinstance(node.get("patternProperties"), dict):
            written = {name: rewrite(name) or name for name in node["patternProperties"]}
            if len(set(written.values())) == len(written):
                node["patternProperties"] = {written[name]: each for name, each in node["patternProperties"].items()}
    return schema


def _written(node: Node, one_of: Callable[[Ranges], str]) -> str:
    def write(node: Node) -> str:
        match node:
            case Chars(ranges):
                return one_of(list(ranges))
            case Sequence(parts):
                return "".join(_group(part, write) if isinstance(part, Either) else write(part) for part in parts)
            case Either(ways):
                return "|".join(map(write, ways))
            case Repeat(part, least, most):
                return f"{write(part) if isinstance(part, Chars) else _group(part, write)}{_count(least, most)}"
        raise AssertionError(node)

    return write(node)


def _group(node: Node, write: Callable[[Node], str]) -> str:
    return f"({write(node)})"


def _count(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (least, least): f"{{{least}}}"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"


def _one_of(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _literal(chr(ranges[0][0]))
    members = (
        _literal(chr(low)) if low == high else f"{_literal(chr(low))}-{_literal(chr(high))}" for low, high in ranges
    )
    return f"[{''.join(members)}]"


def _literal(character: str) -> str:
    return "\\" + character if character in _SPECIAL else character

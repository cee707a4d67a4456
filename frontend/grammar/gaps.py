"""What grammar libraries cannot hold outputs to: keywords of JSON schemas, alone and beside one another.

Libraries leave keywords out that they do not know, some without a word; what is not sure to be held is not tried.
"""

import copy
from typing import Any

from quire.frontend.grammar.schema import ANNOTATIONS, type_of, types_of, values_of, walk

_NOT_IN_XGRAMMAR = (
    *("uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else", "not", "oneOf"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("unevaluatedItems", "$dynamicRef", "$recursiveRef", "$anchor"),
)
_NOTHING_IF_FALSE = ("uniqueItems", "not", "unevaluatedProperties", "unevaluatedItems")  # the last two XGrammar follows
_LOOSE_FORMATS = ("ipv4", "date", "date-time")
_LENGTHS = ("minLength", "maxLength")
NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_ONE_TYPE = (*NUMBER_WORDS, *_LENGTHS, "pattern", "format")
"""What XGrammar forgets where no `type` stands beside it."""

_PLAIN = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
"""A character that JSON needs not escape. Not the other way round: XGrammar counts surrogates as characters."""


def xgrammar_gap(schema: Any, *, strict: bool) -> str | None:
    """A keyword of a normalized `schema` that XGrammar 0.2 does not hold outputs to; None when it holds them to all.

    Args:
        strict: count patterns that it follows but for surrogates, which no text can hold (see `is_loose`), and formats
            that it follows but for the days of a month or leading zeros.
    """
    for node in walk(schema):
        if not isinstance(node, dict):
            continue
        if (word := unfollowed(node)) is not None:
            return _described(word, node)
        patterns = [node.get("pattern"), *(node.get("patternProperties") or {})]
        if strict and any(isinstance(pattern, str) and is_loose(pattern) for pattern in patterns):
            return "pattern" if "pattern" in node else "patternProperties"
        if strict and node.get("format") in _LOOSE_FORMATS:
            return "format"
    return None


def keyword_gap(schema: Any, missing: frozenset[str]) -> str | None:
    """A keyword of a normalized `schema` that is among `missing`, or that no backend but llguidance follows."""
    for node in walk(schema):
        if isinstance(node, dict):
            found = unfollowed(node) or next((word for word in node if word in missing), None)
            if found is not None:
                return _described(found, node)
    return None


def is_loose(pattern: str) -> bool:
    """Whether a pattern may match anything but some characters: to XGrammar, half a surrogate pair is one of them."""
    return (
        "[^" in pattern or any(mark in pattern for mark in ("\\S", "\\W", "\\D")) or "." in pattern.replace("\\.", "")
    )


def _described(word: str, node: dict[str, Any]) -> str:
    """The keyword, with the one beside it that makes it too much."""
    others = {"minLength": ("pattern", "format"), "maxLength": ("pattern", "format"), "pattern": ("format",)}
    other = next((other for other in others.get(word, ()) if other in node), None)
    return f"{word} beside {other}" if other else word


def unfollowed(node: dict[str, Any]) -> str | None:
    """A keyword of one schema, not of those within it, that XGrammar does not hold outputs to as it is used there."""
    for word in _NOT_IN_XGRAMMAR:
        if node.get(word) is not None and not (node[word] is False and word in _NOTHING_IF_FALSE):
            return word
    for word in ("allOf", "anyOf"):
        if word in node and (set(node) - {word} - ANNOTATIONS or (word == "allOf" and len(node[word]) > 1)):
            return word
    if "$ref" in node and (set(node) - {"$ref"} - ANNOTATIONS or "~" in node["$ref"]):
        return "$ref"
    if "multipleOf" in node and node.get("type") != "integer":
        return "multipleOf"
    if ("enum" in node or "const" in node) and (not _values_fit(node) or {"enum", "const"} <= set(node)):
        return "enum" if "enum" in node else "const"
    if isinstance(node.get("properties"), dict) or "required" in node:
        known = set(node.get("properties") or ())
        if set(node.get("required") or ()) - known:
            return "required"
    if any(word in node for word in _LENGTHS) and ("pattern" in node or "format" in node):
        return "minLength" if "minLength" in node else "maxLength"
    if "pattern" in node and "format" in node:
        return "pattern"
    if node.get("properties") and node.get("patternProperties"):  # a name may be under both
        return "patternProperties"
    if "type" not in node and (found := next((word for word in _OF_ONE_TYPE if word in node), None)) is not None:
        return found
    patterns = [node.get("pattern"), *(node.get("patternProperties") or {})]
    if any(isinstance(pattern, str) and _hard(pattern) for pattern in patterns):
        return "pattern" if "pattern" in node else "patternProperties"
    return None


def _values_fit(node: dict[str, Any]) -> bool:
    """Whether nothing beside enum or const takes values out."""
    types = types_of(node)
    rest = set(node) - {"enum", "const", "type"} - ANNOTATIONS
    return not rest and ("type" not in node or all(type_of(value) in types for value in values_of(node) or ()))


def _hard(pattern: str) -> bool:
    """Look-around is not there, and quotes and backslashes would stand in the JSON as they are."""
    marks = ("(?", '"', "\\\\", "\\x", "\\u", "\\p", "\\P", "\\b", "\\B")
    return any(mark in pattern.replace("(?:", "(") for mark in marks)


def lengths_as_patterns(schema: Any) -> Any:
    """`minLength` and `maxLength` written as patterns: XGrammar's own would let control characters through."""
    schema = copy.deepcopy(schema)
    for node in walk(schema):
        if not isinstance(node, dict) or not any(word in node for word in _LENGTHS):
            continue
        low, high = node.pop("minLength", None) or 0, node.pop("maxLength", None)
        if node.get("type", "string") == "string" or "string" in node["type"]:
            node["pattern"] = f"^{_PLAIN}{{{low},{'' if high is None else high}}}$"
    return schema

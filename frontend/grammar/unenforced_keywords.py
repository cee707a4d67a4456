"""Keywords of JSON schemas, and combinations of them, that grammar libraries do not enforce.

Libraries ignore keywords that they do not know, some of them silently. So a library is not tried if a schema has a
keyword that the library may ignore.
"""

from typing import Any

from quire.frontend.grammar.pattern_notations import is_readable, plain_regex
from quire.frontend.grammar.schema import ANNOTATIONS, LARK, type_of, types_of, values_of, walk

_NOT_IN_XGRAMMAR = (
    *(LARK, "uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else", "not", "oneOf"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("unevaluatedItems", "$dynamicRef", "$recursiveRef", "$anchor"),
)
# `false` has no effect in the first two; XGrammar enforces the last two.
_NOTHING_IF_FALSE = ("uniqueItems", "not", "unevaluatedProperties", "unevaluatedItems")
_LOOSE_FORMATS = ("ipv4", "date", "date-time")
_LENGTHS = ("minLength", "maxLength")
NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_OF_ONE_TYPE = (*NUMBER_WORDS, *_LENGTHS, *_COUNTS, "pattern", "format")
"""Keywords that XGrammar ignores in a schema without `type`."""


MAX_LENGTH = 128
"""Longest string whose expression XGrammar expands ahead; a mask for a longer one takes a tenth of a second."""


def xgrammar_gap(schema: Any, *, strict: bool) -> str | None:
    """A keyword of a normalized `schema` that XGrammar 0.2 does not enforce; None if it enforces all.

    Args:
        strict: also return formats in which XGrammar ignores the days of a month or leading zeros, and patterns of
            characters that JSON escapes or lengths over `MAX_LENGTH`, for which it computes masks at length.
    """
    for node in walk(schema):
        if not isinstance(node, dict):
            continue
        if (word := unfollowed(node)) is not None:
            return _described(word, node)
        if strict and node.get("format") in _LOOSE_FORMATS:
            return "format"
        if strict and isinstance(node.get("pattern"), str) and plain_regex(node["pattern"]) is None:
            return "pattern"
        if strict and is_long(node):
            return "maxLength" if "maxLength" in node else "minLength"
    return None


def is_long(node: dict[str, Any]) -> bool:
    """True if `minLength` or `maxLength` of a schema is over `MAX_LENGTH`."""
    return any(node.get(word, 0) > MAX_LENGTH for word in _LENGTHS)


def keyword_gap(schema: Any, missing: frozenset[str]) -> str | None:
    """A keyword of a normalized `schema` that is among `missing`, or that only llguidance enforces."""
    for node in walk(schema):
        if isinstance(node, dict):
            found = unfollowed(node) or next((word for word in node if word in missing), None)
            if found is not None:
                return _described(found, node)
    return None


def is_loose(pattern: str) -> bool:
    """True if a pattern has a negated class or a dot, which XGrammar lets match half a surrogate pair."""
    return (
        "[^" in pattern or any(mark in pattern for mark in ("\\S", "\\W", "\\D")) or "." in pattern.replace("\\.", "")
    )


def _described(word: str, node: dict[str, Any]) -> str:
    """The keyword, with the other keyword of the combination that is not enforced."""
    others = {"minLength": ("pattern", "format"), "maxLength": ("pattern", "format"), "pattern": ("format",)}
    other = next((other for other in others.get(word, ()) if other in node), None)
    return f"{word} beside {other}" if other else word


def unfollowed(node: dict[str, Any]) -> str | None:
    """A keyword of one schema, not of its subschemas, that XGrammar does not enforce in this combination."""
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
    if node.get("properties") and node.get("patternProperties"):  # a name may match both
        return "patternProperties"
    if "type" not in node and (found := next((word for word in _OF_ONE_TYPE if word in node), None)) is not None:
        return found
    return _hard(node)


def _values_fit(node: dict[str, Any]) -> bool:
    """True if `type` is the only keyword with enum or const, and allows all their values."""
    types = types_of(node)
    rest = set(node) - {"enum", "const", "type"} - ANNOTATIONS
    return not rest and ("type" not in node or all(type_of(value) in types for value in values_of(node) or ()))


def _hard(node: dict[str, Any]) -> str | None:
    """A keyword with patterns that XGrammar cannot take.

    A string's pattern becomes separate rules (`TextRules`), but a name's pattern does not. XGrammar distinguishes
    names by the first pattern alone.
    """
    if isinstance(node.get("pattern"), str) and not is_readable(node["pattern"]):
        return "pattern"
    names = node.get("patternProperties") or {}
    if names and (len(names) > 1 or node.get("additionalProperties") or plain_regex(next(iter(names))) is None):
        return "patternProperties"
    return None

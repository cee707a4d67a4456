"""JSON schemas on their way to a grammar library: rewritten to what all of them read, and searched for what one cannot.

Libraries leave keywords out that they do not know, some without a word; what is not sure to be held is not tried.
"""

import copy
from collections.abc import Iterator
from typing import Any

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains"),
    *("propertyNames", "not", "if", "then", "else", "contentSchema"),
)
_COMBINERS = ("allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas")
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "example"),
    *("$id", "$schema", "$defs", "definitions", "nullable", "discriminator", "xml", "externalDocs"),
}
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


class SchemaError(ValueError):
    """The schema itself is wrong: no library can help. The message names the keyword."""


def normalize(schema: Any, *, closed: bool) -> Any:
    """The same schema in fewer words: tuples as `prefixItems`, `oneOf` of branches that exclude each other as `anyOf`.

    Args:
        closed: objects that name their properties hold no others, unless they say so.

    Raises:
        SchemaError: a `$ref` leaves the schema or leads in a circle, or a tuple is written in two ways.
    """
    check_refs(schema)
    return _Normalizer(schema).normalize(schema, closed)


class _Normalizer:
    """Rewrites the parts of one schema, but none that a `$ref` leads through."""

    def __init__(self, root: Any) -> None:
        self._root = root
        refs = [node["$ref"] for node in walk(root) if isinstance(node, dict) and "$ref" in node]
        self._pinned = {part for ref in refs for part in ref.split("/")}

    def normalize(self, node: Any, closed: bool) -> Any:
        """`node` rewritten; `closed` says whether its objects are to be closed."""
        if not isinstance(node, dict):
            return node
        out = dict(node)
        if not self._pinned & {"items", "additionalItems"}:
            _unify_tuples(out)
        if out.get("unevaluatedProperties") is False and not any(word in out for word in _COMBINERS):
            out.setdefault("additionalProperties", False)
            del out["unevaluatedProperties"]
        if closed and _may_close(out):
            out["additionalProperties"] = False
        self._normalize_children(out, closed)
        free = "oneOf" in out and "anyOf" not in out and "oneOf" not in self._pinned
        if free and _exclude_each_other(out["oneOf"], self._root):
            out["anyOf"] = out.pop("oneOf")
        return out

    def _normalize_children(self, out: dict[str, Any], closed: bool) -> None:
        # The parts of an object that is described in several places must not shut each other out.
        alone = closed and "properties" not in out
        for word in _SCHEMA_MAPS:
            if isinstance(out.get(word), dict):
                out[word] = {name: self.normalize(child, closed) for name, child in out[word].items()}
        for word in _SCHEMA_LISTS:
            if isinstance(out.get(word), list):
                deep = alone if word in ("anyOf", "oneOf") else closed and (word != "allOf" or len(out[word]) == 1)
                out[word] = [self.normalize(child, deep) for child in out[word]]
        for word in _SCHEMAS:
            if isinstance(out.get(word), dict):
                deep = closed and word not in ("not", "if", "then", "else")
                out[word] = self.normalize(out[word], deep)


def _unify_tuples(schema: dict[str, Any]) -> None:
    """Drafts before 2020-12 wrote tuples as a list under `items`; without one, `additionalItems` says nothing."""
    rest = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise SchemaError("items is a list beside prefixItems; it must be one schema there")
        schema["prefixItems"] = schema.pop("items")
        if rest is not None:
            schema["items"] = rest


def _may_close(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    return (
        isinstance(properties, dict)
        and not any(word in schema for word in ("additionalProperties", "patternProperties", *_COMBINERS))
        and set(schema.get("required") or ()) <= set(properties)
    )


# -------------------------------------------------------------------------------------------------------------- refs


def check_refs(schema: Any) -> None:
    """Raises SchemaError unless every `$ref` leads to a place in the schema, and at last to something else."""
    for node in walk(schema):
        seen: list[Any] = []
        while isinstance(node, dict) and "$ref" in node:
            if node["$ref"] in seen:
                raise SchemaError(f"$ref {seen[0]!r} leads back to itself")
            seen.append(node["$ref"])
            node = resolve(node["$ref"], schema)


def resolve(ref: Any, root: Any) -> Any:
    """What `ref`, a JSON pointer behind a #, leads to in `root` (RFC 6901)."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise SchemaError(f"$ref {ref!r} leads out of the schema; only references that begin with # are followed")
    node = root
    for part in ref.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            raise SchemaError(f"$ref {ref!r} leads nowhere")
    return node


def walk(schema: Any) -> Iterator[Any]:
    """Every schema in a schema, itself first; not the values under enum, const, default and the like."""
    todo = [schema]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, dict):
            continue
        for word in _SCHEMA_MAPS:
            if isinstance(node.get(word), dict):
                todo += node[word].values()
        for word in (*_SCHEMA_LISTS, "items"):
            if isinstance(node.get(word), list):
                todo += node[word]
        todo += [node[word] for word in _SCHEMAS if isinstance(node.get(word), (dict, bool))]


# ------------------------------------------------------------------------------------------------------------- oneOf


def _exclude_each_other(branches: Any, root: Any) -> bool:
    """Whether no value fits two of `branches`, as far as types, constants and closed objects tell."""
    if not isinstance(branches, list) or len(branches) > 64:
        return False
    solved = [_follow(branch, root) for branch in branches]
    return all(_apart(first, second, root) for place, first in enumerate(solved) for second in solved[place + 1 :])


def _follow(node: Any, root: Any) -> Any:
    while isinstance(node, dict) and "$ref" in node and not set(node) - {"$ref"} - ANNOTATIONS:
        node = resolve(node["$ref"], root)
    return node


def _apart(first: Any, second: Any, root: Any) -> bool:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return not any(value in others and type(value) is type(others[others.index(value)]) for value in values)
    types, other_types = _types(first), _types(second)
    if types and other_types and not types & other_types:
        return True
    return types == other_types == {"object"} and _objects_apart(first, second, root)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    """JSON types that a schema allows, integers counted as numbers; empty when it does not say."""
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(named or ())
    if not names and (values := _values(schema)) is not None:
        names = {_type_of(value) for value in values}
    if not names and isinstance(schema.get("properties"), dict) and schema.get("required"):
        return set()
    return {"number" if name == "integer" else name for name in names}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), ((int, float), "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _objects_apart(first: dict[str, Any], second: dict[str, Any], root: Any) -> bool:
    mine, yours = first.get("properties") or {}, second.get("properties") or {}
    needs, asks = set(first.get("required") or ()), set(second.get("required") or ())
    for name in needs & asks & set(mine) & set(yours):
        if _apart(_follow(mine[name], root), _follow(yours[name], root), root):
            return True
    return (second.get("additionalProperties") is False and bool(needs - set(yours))) or (
        first.get("additionalProperties") is False and bool(asks - set(mine))
    )


# ---------------------------------------------------------------------------------------------------------- XGrammar


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
    if "type" not in node and (word := next((word for word in _OF_ONE_TYPE if word in node), None)) is not None:
        return word
    patterns = [node.get("pattern"), *(node.get("patternProperties") or {})]
    if any(isinstance(pattern, str) and _hard(pattern) for pattern in patterns):
        return "pattern" if "pattern" in node else "patternProperties"
    return None


def _values_fit(node: dict[str, Any]) -> bool:
    """Whether nothing beside enum or const takes values out."""
    types = _types(node)
    rest = set(node) - {"enum", "const", "type"} - ANNOTATIONS
    return not rest and ("type" not in node or all(_type_of(value) in types for value in _values(node) or ()))


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

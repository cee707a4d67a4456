"""Prepares JSON schemas for grammar libraries: checks references, and rewrites keywords that some do not read."""

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

LARK = "x-lark"
"""Our own keyword, for the strings of custom tools: the Lark grammar of a string. XGrammar alone follows it."""


class SchemaError(ValueError):
    """The schema itself is invalid, for every library. The message names the keyword."""


def normalize(schema: Any, *, closed: bool) -> Any:
    """An equivalent schema with fewer keywords: tuples as `prefixItems`, and `oneOf` as `anyOf` if no value fits two.

    Args:
        closed: objects with `properties` allow no other properties, unless the schema says so.

    Raises:
        SchemaError: a `$ref` leaves the schema or refers to itself, or a tuple is written in two ways.
    """
    check_refs(schema)
    return _Normalizer(schema).normalize(schema, closed)


class _Normalizer:
    """Rewrites one schema, but no keyword that is in the path of a `$ref`."""

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
        # If several subschemas describe parts of one object, none may be closed, or it would exclude the other parts.
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
    """Rewrites a tuple of a draft before 2020-12, a list under `items`. Only then does `additionalItems` matter."""
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
    """Raises SchemaError unless every `$ref` leads to a place in the schema, and no chain of them is a circle."""
    for node in walk(schema):
        seen: list[Any] = []
        while isinstance(node, dict) and "$ref" in node:
            if node["$ref"] in seen:
                raise SchemaError(f"$ref {seen[0]!r} leads back to itself")
            seen.append(node["$ref"])
            node = resolve(node["$ref"], schema)


def resolve(ref: Any, root: Any) -> Any:
    """The part of `root` that `ref`, a # and a JSON pointer (RFC 6901), refers to."""
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
    """The schema itself, then every subschema; not the values under enum, const, default and the like."""
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
    """Whether no value fits two of `branches`, judged by types, constants and closed objects."""
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
    values, others = values_of(first), values_of(second)
    if values is not None and others is not None:
        return not any(value in others and type(value) is type(others[others.index(value)]) for value in values)
    types, other_types = types_of(first), types_of(second)
    if types and other_types and not types & other_types:
        return True
    return types == other_types == {"object"} and _objects_apart(first, second, root)


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values that `enum` or `const` allows; None without either."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def types_of(schema: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows; integers count as numbers. Empty if the schema does not say."""
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(named or ())
    if not names and (values := values_of(schema)) is not None:
        names = {type_of(value) for value in values}
    if not names and isinstance(schema.get("properties"), dict) and schema.get("required"):
        return set()
    return {"number" if name == "integer" else name for name in names}


def type_of(value: Any) -> str:
    """The JSON type of a value; integers count as numbers."""
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

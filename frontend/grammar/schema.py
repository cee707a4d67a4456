"""JSON schemas as trees: their subschemas and references, and a check that no value fits two of them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains"),
    *("propertyNames", "not", "if", "then", "else", "contentSchema"),
)
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "example"),
    *("$id", "$schema", "$defs", "definitions", "nullable", "discriminator", "xml", "externalDocs"),
}

LARK = "x-lark"
"""Quire's own keyword, for the strings of custom tools: the Lark grammar of a string. XGrammar alone follows it."""


class SchemaError(ValueError):
    """The schema itself is invalid, for every library. The message names the keyword."""


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
    """The part of `root` that `ref` refers to: a # and a JSON pointer (RFC 6901), or the name of an `$anchor`."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        raise SchemaError(f"$ref {ref!r} leads out of the schema; only references that begin with # are followed")
    if not ref.startswith("#/") and ref != "#":
        found = [node for node in walk(root) if isinstance(node, dict) and node.get("$anchor") == ref[1:]]
        if not found:
            raise SchemaError(f"$ref {ref!r} leads nowhere")
        return found[0]
    node = root
    for part in ref.split("/")[1:]:
        for key in (_unescaped(unquote(part)), _unescaped(part)):
            if isinstance(node, dict) and key in node:
                node = node[key]
                break
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
                break
        else:
            raise SchemaError(f"$ref {ref!r} leads nowhere")
    return node


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def walk(schema: Any) -> Iterator[Any]:
    """The schema itself, then every subschema; not the values under enum, const, default and the like."""
    todo = [schema]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, dict):
            continue
        for word in SCHEMA_MAPS:
            if isinstance(node.get(word), dict):
                todo += node[word].values()
        for word in (*SCHEMA_LISTS, "items"):
            if isinstance(node.get(word), list):
                todo += node[word]
        todo += [node[word] for word in SCHEMAS if isinstance(node.get(word), (dict, bool))]


# ------------------------------------------------------------------------------------------------------------- oneOf


def exclude_each_other(branches: Any, root: Any) -> bool:
    """True if types, constants or closed objects show that no value fits two of `branches`."""
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
    """The JSON types that a schema allows; `integer` counts as `number`. Empty if the schema does not limit them."""
    named = schema.get("type")
    names = {named} if isinstance(named, str) else set(named or ())
    if not names and (values := values_of(schema)) is not None:
        names = {type_of(value) for value in values}
    if not names and isinstance(schema.get("properties"), dict) and schema.get("required"):
        return set()
    return {"number" if name == "integer" else name for name in names}


def type_of(value: Any) -> str:
    """The JSON type of a value; `number` for an integer."""
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

"""Turns the text of an argument, from formats without JSON, into JSON of the type in the function's schema."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Self

from msgspec import Struct

from quire.frontend.grammar.schema import SchemaError, resolve
from quire.frontend.parsing.json_text import quote
from quire.frontend.parsing.literals import literal_to_json, scalar_to_json
from quire.frontend.parsing.tools import Tool

_SPELLINGS = {
    "string": "str text varchar char enum",
    "integer": "int int32 int64 uint uint32 uint64 long short unsigned",
    "number": "float float32 float64 double",
    "boolean": "bool",
    "object": "dict",
    "array": "arr list sequence",
}
_ALIASES = {each: kind for kind, others in _SPELLINGS.items() for each in others.split()}
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_PYTHON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_MAX_REFERENCES = 8
_MAX_DEPTH = 64


def argument_types(tool: Tool | None, argument: str) -> frozenset[str]:
    """The JSON types that the tool's schema allows for `argument`; empty if it does not say."""
    root, properties = _parameters(tool)
    return schema_types(properties.get(argument), root)


def schema_types(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The JSON types that `schema`, a part of `root`, allows; empty if it does not say."""
    return frozenset(_types(schema, root, 0))


def json_argument(text: str, tool: Tool | None, argument: str) -> str:
    """The text of an argument that the model says is JSON, as JSON of the types in the tool's schema.

    Values within objects and lists are converted, too, where the schema describes them.
    """
    root, properties = _parameters(tool)
    schema = properties.get(argument)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return to_json(text, schema_types(schema, root))
    typed = _conformed(value, schema, root)
    return text.strip() if typed == value and type(typed) is type(value) else json.dumps(typed, ensure_ascii=False)


class ValueSchema(Struct, frozen=True):
    """A part of the schema of a tool's arguments, which a value is read by."""

    root: dict[str, Any]
    schema: Any

    @classmethod
    def of(cls, tool: Tool | None) -> Self:
        """The schema of all arguments."""
        root = _parameters(tool)[0]
        return cls(root, root)

    @property
    def types(self) -> frozenset[str]:
        """The JSON types of the value; empty if the schema does not say."""
        return schema_types(self.schema, self.root)

    def member(self, name: str) -> "ValueSchema":
        """The schema of an object's member."""
        return ValueSchema(self.root, properties_of(self.schema, self.root).get(name))

    def item(self) -> "ValueSchema":
        """The schema of a list's items."""
        return ValueSchema(self.root, self._resolved("items"))

    def convert(self, text: str) -> str:
        """The text of a value as JSON of its types."""
        return to_json(text, self.types)

    def _resolved(self, keyword: str) -> Any:
        schema = self.schema
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = target_of(schema["$ref"], self.root)
        return schema.get(keyword) if isinstance(schema, dict) else None


def wraps_arguments(tool: Tool | None, argument: str) -> bool:
    """True if an argument cannot be one of the tool's, which has others."""
    properties = _parameters(tool)[1]
    return bool(properties) and argument not in properties


def unwrapped(value: str, tool: Tool | None) -> str | None:
    """All arguments of a call, which the model wrote as the value of a single one; None if `value` is not that.

    Args:
        value: JSON; an object, or a string that holds one.
    """
    root, properties = _parameters(tool)
    try:
        inner = json.loads(value)
        inner = json.loads(inner) if isinstance(inner, str) else inner
    except (ValueError, RecursionError):
        return None
    if not isinstance(inner, dict) or not inner.keys() <= properties.keys():
        return None
    return json.dumps(_conformed(inner, root, root), ensure_ascii=False)


def conformed_arguments(text: str, tool: Tool | None) -> str:
    """Arguments, an object in JSON, with the types of the tool's schema where they differ."""
    root = _parameters(tool)[0]
    value = json.loads(text)
    typed = _conformed(value, root, root)
    return text if json.dumps(typed) == json.dumps(value) else json.dumps(typed, ensure_ascii=False)


def _parameters(tool: Tool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a tool's arguments, and the schemas of each; empty if the tool has none."""
    root = tool.parameters if tool else None
    properties = properties_of(root, root) if isinstance(root, dict) else {}
    return (root, properties) if isinstance(root, dict) and properties else ({}, {})


def _conformed(value: Any, schema: Any, root: dict[str, Any], depth: int = 0) -> Any:
    """`value` with the types that `schema` asks for, where they differ and the text can be read as one of them."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return value
    if isinstance(value, dict) and (properties := properties_of(schema, root)):
        return {key: _conformed(each, properties.get(key), root, depth + 1) for key, each in value.items()}
    if isinstance(schema.get("$ref"), str):
        return _conformed(value, target_of(schema["$ref"], root), root, depth + 1)
    if isinstance(value, list):
        return [_conformed(each, schema.get("items"), root, depth + 1) for each in value]
    types = schema_types(schema, root)
    if isinstance(value, dict) or not types or _type_of(value) in types:
        return value
    return json.loads(to_json(value if isinstance(value, str) else json.dumps(value), types))


def _types(schema: Any, root: dict[str, Any], depth: int) -> Iterable[str]:
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return
    declared = schema.get("type")
    for each in [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []:
        if isinstance(each, str):
            yield _ALIASES.get(each.lower(), each.lower())
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema[key] if isinstance(schema.get(key), list) else []:
            yield from _types(branch, root, depth + 1)
    if declared is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values if isinstance(values, list) else []:
            yield _type_of(value)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _types(target_of(reference, root), root, depth + 1)


def target_of(reference: str, root: dict[str, Any]) -> Any:
    """The schema in `root` that `reference` points to; None if there is none."""
    try:
        return resolve(reference, root)
    except SchemaError:
        return None


def properties_of(schema: Any, root: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """The schemas of an object's members, by name, with those of the schemas that `$ref` and `allOf` name."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return {}
    parts = [target_of(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    parts += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    found: dict[str, Any] = {}
    for part in parts:
        found |= properties_of(part, root, depth + 1)
    own = schema.get("properties")
    return found | own if isinstance(own, dict) else found


def _type_of(value: Any) -> str:
    return _PYTHON_TYPES.get(type(value), "null")


def to_json(text: str, types: frozenset[str]) -> str:
    """`text` as JSON of one of `types`; as a string if it has none of them.

    Without types, JSON of any type stays unchanged. Objects, lists and constants may be in Python's notation.
    """
    stripped = text.strip()
    lowered = stripped.lower()
    if "null" in types and lowered in ("null", "none"):
        return "null"
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _from_python(stripped, types) or f'"{quote(text)}"'
    found = _type_of(value)
    if not types or (found in types and found != "string") or (found == "integer" and "number" in types):
        return stripped
    if found == "number" and "integer" in types and math.isfinite(value) and value == int(value):
        return str(int(value))
    if "boolean" in types and stripped in ("0", "1"):
        return "true" if value else "false"
    return f'"{quote(text)}"'


def _from_python(text: str, types: frozenset[str]) -> str | None:
    """A number, dictionary, list or constant that is no JSON as JSON; None if `text` is none that `types` allow."""
    if "integer" in types and _INTEGER.fullmatch(text):
        return str(int(text))
    if "number" in types and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return repr(float(text))
    kind = "object" if text.startswith("{") else "array" if text.startswith(("[", "(")) else ""
    if not types and text in ("True", "False", "None"):
        return scalar_to_json(text)
    return literal_to_json(text) if kind and (kind in types or not types) else None


def _refuse(constant: str) -> float:
    raise ValueError(constant)

"""A format of calls as text around JSON schemas, from which a grammar is made."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from quire.frontend.grammar.normalized import simplified
from quire.frontend.grammar.schema import walk

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of arguments that may be any."""


class CallTag(Struct, frozen=True):
    """One call, or all calls if the model writes a list: `begin`, then text that matches `content`, then `end`.

    `content` is a format of XGrammar's structural tags.
    """

    begin: str
    content: dict[str, Any]
    end: str


class CallTags(Struct, frozen=True, kw_only=True):
    """How calls follow one another.

    Attributes:
        tags: the alternatives: one tag per function, or a single tag if `whole`.
        trigger: the text with which every tag begins, and which answers without calls do not contain; may be empty.
        separator: the text between two tags.
        section: the texts before the first tag and after the last.
        whole: one tag contains all calls.
        before: a format, in XGrammar's notation, for text that may precede the calls.
        single: an answer has at most one call.
    """

    tags: list[CallTag]
    trigger: str = ""
    separator: str = ""
    section: tuple[str, str] | None = None
    whole: bool = False
    before: dict[str, Any] | None = None
    single: bool = False


def schema_content(schema: dict[str, Any], style: str = "json") -> dict[str, Any]:
    """A format for content that matches `schema`, written in one of XGrammar's styles."""
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    return content if style == "json" else {**content, "style": style}


def call_object(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call as OpenAI writes one: an object with the function's name and its parameters."""
    return closed_object({"name": {"const": name}, "parameters": arguments})


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these properties, all of them required, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def call_list_schema(
    schemas: dict[str, dict[str, Any]], call: Callable[[str, dict[str, Any]], dict[str, Any]] = call_object
) -> dict[str, Any]:
    """The schema of a JSON list of at least one call.

    Args:
        schemas: the arguments' schemas, by function.
        call: makes the schema of one call from the function's name and the arguments' schema.

    References within a schema point to its own root. So its definitions move to the list's root, under unique names.
    """
    definitions: dict[str, Any] = {}
    items = []
    for index, (name, schema) in enumerate(schemas.items()):
        if not _names_definitions(schema):
            schema = simplified(schema)
        moved = {}
        for key in ("$defs", "definitions"):
            for each, definition in (schema.get(key) or {}).items() if isinstance(schema.get(key), dict) else ():
                moved[f"#/{key}/{each}"] = f"{index}_{key.lstrip('$')}_{each}"
                definitions[moved[f"#/{key}/{each}"]] = definition
        body = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        if _refers_to_itself(schema):
            moved["#"] = f"{index}_whole"
            definitions[moved["#"]] = body
        for target in moved.values():
            definitions[target] = _redirect(definitions[target], moved)
        items.append(call(name, _redirect(body, moved)))
    whole = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": items}}
    return {**whole, "$defs": definitions} if definitions else whole


def _names_definitions(schema: dict[str, Any]) -> bool:
    """True if each reference of a schema names a definition of its root, or the root."""
    known = {"#"}
    for key in ("$defs", "definitions"):
        known |= {f"#/{key}/{each}" for each in schema[key]} if isinstance(schema.get(key), dict) else set()
    return _references(schema) <= known


def _refers_to_itself(schema: dict[str, Any]) -> bool:
    return "#" in _references(schema)


def _references(schema: dict[str, Any]) -> set[str]:
    return {str(node["$ref"]) for node in walk(schema) if isinstance(node, dict) and "$ref" in node}


def _redirect(schema: Any, moved: dict[str, str]) -> Any:
    """`schema` with its references to moved definitions redirected."""
    if isinstance(schema, list):
        return [_redirect(each, moved) for each in schema]
    if not isinstance(schema, dict):
        return schema
    redirected = {key: _redirect(value, moved) for key, value in schema.items()}
    if (target := moved.get(str(schema.get("$ref")))) is not None:
        redirected["$ref"] = f"#/$defs/{target}"
    return redirected

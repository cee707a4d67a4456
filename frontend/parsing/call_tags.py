"""A format of calls as text around JSON schemas: what a grammar needs to know of it."""

from typing import Any

from msgspec import Struct


class CallTag(Struct, frozen=True):
    """One call, or all of them where the model writes a list: `begin`, then what `content` matches, then `end`.

    `content` is a format of xgrammar's structural tags.
    """

    begin: str
    content: dict[str, Any]
    end: str


class CallTags(Struct, frozen=True, kw_only=True):
    """How calls follow one another.

    Attributes:
        tags: the alternatives, one per function; a single one where `whole`.
        trigger: what every tag begins with and answers without calls do not hold; empty when there is no such thing.
        separator: what stands between two tags.
        section: what stands around all of them.
        whole: one tag is all calls at once.
        before: what may precede calls, as a format of xgrammar's.
        single: an answer holds one call at most.
    """

    tags: list[CallTag]
    trigger: str = ""
    separator: str = ""
    section: tuple[str, str] | None = None
    whole: bool = False
    before: dict[str, Any] | None = None
    single: bool = False


def schema_content(schema: dict[str, Any], style: str = "json") -> dict[str, Any]:
    """The content that follows `schema`, in one of xgrammar's notations."""
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
    return content if style == "json" else {**content, "style": style}


def call_list_schema(schemas: dict[str, dict[str, Any]], arguments_key: str) -> dict[str, Any]:
    """A JSON list of at least one call object; `schemas` are the arguments' by function.

    References within a schema point to its own root, so its definitions move to the list's root under names of theirs.
    """
    definitions: dict[str, Any] = {}
    items = []
    for index, (name, schema) in enumerate(schemas.items()):
        moved = {}
        for key in ("$defs", "definitions"):
            for each, definition in (schema.get(key) or {}).items() if isinstance(schema.get(key), dict) else ():
                moved[f"#/{key}/{each}"] = f"{index}_{key.lstrip('$')}_{each}"
                definitions[moved[f"#/{key}/{each}"]] = definition
        body = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        for target in moved.values():
            definitions[target] = _redirect(definitions[target], moved)
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, arguments_key: _redirect(body, moved)},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    whole = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": items}}
    return {**whole, "$defs": definitions} if definitions else whole


def _redirect(schema: Any, moved: dict[str, str]) -> Any:
    """`schema` with references to moved definitions pointing to where they are now."""
    if isinstance(schema, list):
        return [_redirect(each, moved) for each in schema]
    if not isinstance(schema, dict):
        return schema
    redirected = {key: _redirect(value, moved) for key, value in schema.items()}
    if (target := moved.get(str(schema.get("$ref")))) is not None:
        redirected["$ref"] = f"#/$defs/{target}"
    return redirected

"""Structural tags and JSON schemas that make an answer contain the calls that a request asks for."""

from collections.abc import Sequence
from typing import Any

from quire.frontend.grammar.non_strict_schemas import loosened
from quire.frontend.grammar.normalized import simplified
from quire.frontend.parsing.formats.harmony import Harmony
from quire.frontend.parsing.formats.response_template import ResponseTemplate
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import ANY_OBJECT, CallTag, CallTags, call_list_schema
from quire.frontend.parsing.tools import Tool, ToolChoice


def tool_call_structure(
    form: CallShape | Harmony | ResponseTemplate, tools: Sequence[Tool], choice: ToolChoice
) -> dict[str, Any] | None:
    """The calls of `choice` in the model's own format, as a structural tag in XGrammar's notation.

    The schema of a strict function is enforced. If a call is required, other schemas are enforced as far as libraries
    can. With "auto", only the calls are constrained, and only if a function is strict.

    Returns:
        `{"type": "structural_tag", "format": {...}}`, as `response_format` takes it; None if nothing is enforced, or if
        no structural tag can describe the format.
    """
    schemas = _schemas(tools, choice)
    if not schemas or (choice.mode == "auto" and not any(tool.strict for tool in tools)):
        return None
    tags = form.call_tags(schemas) or form.call_tags({name: simplified(schema) for name, schema in schemas.items()})
    if tags is None or (choice.mode == "auto" and not tags.trigger):
        return None
    one = choice.mode == "named" or choice.max_calls == 1 or tags.single
    if one and tags.whole:
        content = tags.tags[0].content
        tags.tags[0] = CallTag(tags.tags[0].begin, {**content, "json_schema": _only_one(content)}, tags.tags[0].end)
    return {"type": "structural_tag", "format": _assemble(tags, choice, one)}


def tool_call_schema(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
    """The JSON schema of the whole answer, for a model without a format or without a structural tag for it.

    A named function's answer is its arguments; a required call is a list of `{"name", "parameters"}`.
    """
    schemas = _schemas(tools, choice)
    if not schemas or choice.mode not in ("required", "named"):
        return None
    if choice.mode == "named":
        return next(iter(schemas.values()))
    schema = call_list_schema(schemas)
    return {**schema, "maxItems": 1} if choice.max_calls == 1 else schema


def _schemas(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, dict[str, Any]]:
    """Schemas of the arguments of the functions that may be called, by name."""
    return {
        tool.name: _schema(tool, choice)
        for tool in tools
        if choice.mode != "none" and (choice.mode != "named" or tool.name == choice.name)
    }


def _schema(tool: Tool, choice: ToolChoice) -> dict[str, Any]:
    """The schema to enforce. If a function is not strict, keywords that cannot be enforced are left out."""
    if not tool.parameters:
        return ANY_OBJECT
    if tool.strict:
        return tool.parameters
    return ANY_OBJECT if choice.mode == "auto" else loosened(tool.parameters)


def _only_one(content: dict[str, Any]) -> dict[str, Any]:
    return {**content["json_schema"], "maxItems": 1}


def _assemble(tags: CallTags, choice: ToolChoice, one: bool) -> dict[str, Any]:
    rendered = [{"type": "tag", "begin": tag.begin, "content": tag.content, "end": tag.end} for tag in tags.tags]
    if tags.section is None and choice.mode == "auto":
        return {"type": "triggered_tags", "triggers": [tags.trigger], "tags": rendered, "stop_after_first": one}
    if tags.whole:
        group: dict[str, Any] = rendered[0] if tags.tags[0].begin else tags.tags[0].content
    else:
        group = {
            "type": "tags_with_separator",
            "tags": rendered,
            "separator": tags.separator,
            "at_least_one": True,
            "stop_after_first": one,
        }
    if tags.section is None:
        return {"type": "sequence", "elements": [tags.before, group]} if tags.before else group
    section = {"type": "tag", "begin": tags.section[0], "content": group, "end": tags.section[1]}
    if choice.mode == "auto":
        return {"type": "triggered_tags", "triggers": [tags.trigger], "tags": [section], "stop_after_first": True}
    return {"type": "sequence", "elements": [tags.before, section]} if tags.before else section

"""The parsers `hf` and `beam`: a checkpoint's own description of its answers, read by Transformers' parser.

The description is `response_template` in tokenizer_config.json: how reasoning, content and calls begin and end, and how
a call is written. Reasoning and content come as they grow, a call once it is complete.
"""

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quire.core.errors import ConfigError
from quire.frontend.parsing.arguments.typed_values import argument_types
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.formats.reasoning import ReasoningFormat
from quire.frontend.parsing.reader import Sink, TextEnd
from quire.frontend.parsing.shapes import template_calls
from quire.frontend.parsing.shapes.call_shape import CallShape
from quire.frontend.parsing.shapes.call_tags import CallTags
from quire.frontend.parsing.tools import Tool

THINKING, CONTENT, CALLS = "thinking", "content", "tool_calls"
_FIELDS = {THINKING, CONTENT, CALLS}
_DELIMITERS = ("open", "close", "open_pattern", "close_pattern")


class ResponseTemplate:
    """A description, checked.

    Args:
        spec: the description; None if the checkpoint has none.
        flag: the option that asks for it, for errors.

    Raises:
        ConfigError: there is no description, it is malformed, or it has fields that no protocol represents.
    """

    def __init__(self, spec: dict[str, Any] | None, flag: str) -> None:
        if not isinstance(spec, dict):
            raise ConfigError(
                f"{flag}: hf and beam need a response_template in the checkpoint's tokenizer_config.json, and "
                "there is none; choose the parser of the model's format by name."
            )
        try:
            from transformers.utils.chat_parsing.response_templates import load_response_template  # half a second
        except ImportError:
            raise ConfigError(f"{flag}: hf and beam need Transformers 5.23 or newer.") from None
        try:
            fields = load_response_template(spec).fields
            _check(spec, fields)
            self._template = load_response_template(_for_streams(spec))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{flag}: response_template in tokenizer_config.json cannot be used: {error}") from None
        wanted = THINKING if "reasoning" in flag else CALLS
        if wanted not in fields:
            raise ConfigError(f"{flag}: response_template in tokenizer_config.json does not describe {wanted}.")
        self._spec = spec
        self._field = self._template.fields.get(CALLS)
        self._reads_json = bool(_json_values(spec["fields"].get(CALLS, {})))
        self._shape = self._find_shape()

    def _find_shape(self) -> CallShape | None:
        """The shape in which a grammar lets a model write calls, if the template's parser reads them so."""
        shape = None if self._field is None else template_calls.call_shape(self._field)
        if shape is None:
            return None
        function = {"name": template_calls.PROBE_NAME, "parameters": template_calls.PROBE_SCHEMA}
        parser = _parser(self._template, "", [{"type": "function", "function": function}])
        events = parser.feed(template_calls.probe(shape)) + parser.finalize()[1]
        values = [each["value"] for each in events if (each["type"], each["field"]) == ("region_end", CALLS)]
        read = [call for value in values for call in _calls(value)]
        return shape if read == [(template_calls.PROBE_NAME, template_calls.PROBE_ARGUMENTS)] else None

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals of the format that may be special tokens; those of patterns stand in them, without backslashes."""
        found = [field[name] for field in self._spec["fields"].values() for name in _DELIMITERS if name in field]
        literals = [text for each in found for text in ([each] if isinstance(each, str) else each)]
        return tuple(text.replace("\\", "") for text in literals) + tuple(
            text for field in self._spec["fields"].values() for text in _strings(field.get("content_args"))
        )

    @property
    def marks(self) -> ReasoningFormat | None:
        """The marks around reasoning; None unless they are plain text."""
        field = self._template.fields.get(THINKING)
        if field is None or not field.open_literals or not field.close_literals:
            return None
        return ReasoningFormat(begin=tuple(field.open_literals), end=tuple(field.close_literals))

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> CallTags | None:
        """The format around the arguments' schemas, by function; None if no grammar can describe the format."""
        if self._field is None or self._shape is None:
            return None
        if not template_calls.fits(self._field, self._shape, schemas):
            return None
        tags = self._shape.call_tags(schemas)
        if tags is None:
            return None
        return replace(tags, trigger=template_calls.trigger(self._field), single=not self._field.repeats)

    def open(
        self, log: EventLog, content: Sink, prompt_text: str, tools: Sequence[Tool], *, reasoning: bool, calls: bool
    ) -> "TemplateFilter":
        """The filter that reads one answer.

        Args:
            content: takes the content, and what is not read.
            reasoning: whether reasoning is separated from the content.
            calls: whether calls are; if not, they are content as the model wrote them.
        """
        described = [
            {"type": "function", "function": {"name": each.name, "parameters": each.parameters}} for each in tools
        ]
        parser = _parser(self._template, prompt_text, described)
        values = {tool.name: tool for tool in tools} if self._reads_json else None
        return TemplateFilter(parser, log, content, reasoning=reasoning, calls=calls, json_values_of=values)


class TemplateFilter:
    """A `TextFilter` that reads one answer by a template.

    Args:
        json_values_of: the tools, by name, if arguments without a type in their schema are read as JSON.
    """

    def __init__(
        self,
        parser: Any,
        log: EventLog,
        content: Sink,
        *,
        reasoning: bool,
        calls: bool,
        json_values_of: dict[str, Tool] | None,
    ) -> None:
        self._json_values_of = json_values_of
        self._parser = parser
        self._log = log
        self._content = content
        self._reasoning = reasoning
        self._calls = calls
        self._begun = False

    def push(self, text: str) -> None:
        """Takes the next piece of text."""
        self._begun = True
        self._write(self._parser.feed(text))

    def finish(self, by: TextEnd) -> None:
        """Ends the text."""
        if self._begun:
            self._write(self._parser.finalize()[1])

    def _write(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind, field = event["type"], event["field"]
            if field == CALLS:
                if kind == "region_end":
                    self._write_calls(event)
            elif field == THINKING and self._reasoning:
                self._write_reasoning(kind, event)
            elif kind == "region_chunk":
                self._content(event["text"])

    def _write_reasoning(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "region_chunk":
            self._log.reasoning(event["text"])
        elif kind == "region_open":
            self._log.reasoning_begins()
        elif kind == "region_end":
            self._log.reasoning_ends()

    def _write_calls(self, event: dict[str, Any]) -> None:
        calls = _calls(event["value"]) if self._calls else []
        if not calls:
            self._content(event["raw"])
        for name, arguments in calls:
            if self._json_values_of is not None and isinstance(arguments, dict):
                arguments = _typed(arguments, self._json_values_of.get(name))
            self._log.call_starts(name)
            self._log.arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
            self._log.call_ends()


def _calls(value: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of each call in a region; none if one of them is not whole."""
    found = []
    for each in value if isinstance(value, list) else [value]:
        function = each.get("function") if isinstance(each, dict) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
        )
        if not isinstance(name, str) or not name or arguments is None:
            return []
        found.append((name, arguments))
    return found


def _json_values(field: dict[str, Any]) -> dict[str, Any] | None:
    """The parser of a call's values, if it reads them as JSON and takes other text for strings."""
    parser = (field.get("content_args") or {}).get("value_parser")
    reads = (
        isinstance(parser, dict) and parser.get("name") == "json" and (parser.get("args") or {}).get("allow_non_json")
    )
    return parser if reads else None


def _typed(arguments: dict[str, Any], tool: Tool | None) -> dict[str, Any]:
    """Reads texts among the arguments as JSON; where the schema has a type, only quoted strings."""
    return {name: _value(value, argument_types(tool, name)) for name, value in arguments.items()}


def _value(value: Any, types: frozenset[str]) -> Any:
    if not isinstance(value, str) or (types and not value.lstrip().startswith('"')):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return read if not types or isinstance(read, str) else value


def _check(spec: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises ValueError for what no protocol represents: other fields, and texts that are rewritten at their end."""
    if others := (set(fields) - _FIELDS) | (set(spec.get("defaults") or {}) - {"role"}):
        raise ValueError(f"{', '.join(sorted(others))} is not among {', '.join(sorted(_FIELDS))}")
    for name in fields.keys() & {THINKING, CONTENT}:
        field = fields[name]
        if field.content != "text" or field.transform is not None or field.join is not None:
            raise ValueError(f"{name} must be plain text, without transform and join")


def _for_streams(spec: dict[str, Any]) -> dict[str, Any]:
    """The description with every field optional, and all text outside of other fields as content.

    Values that may be JSON stay texts, which Transformers then gives the types of the schema: a string of digits would
    be a number otherwise.
    """
    fields = {name: {**field, "optional": True} for name, field in spec["fields"].items()}
    if _json_values(fields.get(CALLS, {})):
        others = {key: value for key, value in fields[CALLS]["content_args"].items() if key != "value_parser"}
        fields[CALLS]["content_args"] = others
    if CONTENT not in fields and all("open" in field or "open_pattern" in field for field in fields.values()):
        fields[CONTENT] = {"optional": True}
    return {**spec, "fields": fields}


def _strings(value: Any) -> list[str]:
    """All strings within `value`, without backslashes."""
    if isinstance(value, str):
        return [value.replace("\\", "")]
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in within for text in _strings(each)]


def _parser(template: Any, prompt_text: str, tools: list[Any]) -> Any:
    """Transformers' parser, which ends each region by `region_end` with its value, or None, and its text as written."""
    from transformers.utils.chat_parsing import ResponseParser

    class Parser(ResponseParser):
        _begins_at = 0
        num_given = 0  # characters of the prompt that the answer continues

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
            self._begins_at = match.start()
            super()._open_explicit(events, field, match)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            name, was_open, value = self._current, self._opened, None
            try:
                super()._close_current(events)
            except (KeyError, TypeError, ValueError):  # a malformed call
                self._reset_to_implicit()
            else:
                value = events.pop()["value"] if name is not None and was_open else None
            if name is not None and was_open:
                raw = self._buffer[max(self._begins_at, self.num_given) : self._pos]
                events.append({"type": "region_end", "field": name, "value": value, "raw": raw})

    parser = Parser(template, prefix=prompt_text, tools=tools)
    parser.num_given = len(parser._buffer)
    return parser

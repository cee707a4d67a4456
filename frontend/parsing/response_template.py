"""The parsers `hf` and `beam`: a checkpoint's own description of its answers, read by Transformers' parser.

The description is `response_template` in tokenizer_config.json: how reasoning, content and calls begin and end, and how
a call is written. Reasoning and content come as they grow, a call once it is complete.
"""

import json
from collections.abc import Sequence
from typing import Any

from quire.core.errors import ConfigError
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.reader import Sink, TextEnd
from quire.frontend.parsing.reasoning import ReasoningFormat
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
        ConfigError: there is no description, it is malformed, or it has fields that no protocol can tell.
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

    def call_tags(self, schemas: dict[str, dict[str, Any]]) -> None:
        """None: there is no grammar for such a description."""

    def open(
        self, log: EventLog, content: Sink, prompt_text: str, tools: Sequence[Tool], *, reasoning: bool, calls: bool
    ) -> "TemplateStage":
        """The stage that reads one answer.

        Args:
            content: takes the content, and what is not read.
            reasoning: whether reasoning is told apart from the content.
            calls: whether calls are; if not, they are content as the model wrote them.
        """
        described = [
            {"type": "function", "function": {"name": each.name, "parameters": each.parameters}} for each in tools
        ]
        return TemplateStage(
            _parser(self._template, prompt_text, described), log, content, reasoning=reasoning, calls=calls
        )


class TemplateStage:
    """See `Stage`."""

    def __init__(self, parser: Any, log: EventLog, content: Sink, *, reasoning: bool, calls: bool) -> None:
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
            self._log.call_starts(name)
            self._log.arguments(arguments)
            self._log.call_ends()


def _calls(value: Any) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of each call in a region; none if one of them is not whole."""
    found = []
    for each in value if isinstance(value, list) else [value]:
        function = each.get("function") if isinstance(each, dict) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
        )
        if not isinstance(name, str) or not name or arguments is None:
            return []
        found.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return found


def _check(spec: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises ValueError for what protocols cannot tell: other fields, and texts that are rewritten at their end."""
    if others := (set(fields) - _FIELDS) | (set(spec.get("defaults") or {}) - {"role"}):
        raise ValueError(f"{', '.join(sorted(others))} is not among {', '.join(sorted(_FIELDS))}")
    for name in fields.keys() & {THINKING, CONTENT}:
        field = fields[name]
        if field.content != "text" or field.transform is not None or field.join is not None:
            raise ValueError(f"{name} must be plain text, without transform and join")


def _for_streams(spec: dict[str, Any]) -> dict[str, Any]:
    """The description with every field optional, and all text outside of other fields as content."""
    fields = {name: {**field, "optional": True} for name, field in spec["fields"].items()}
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

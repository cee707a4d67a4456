"""Tools that take free text. The model sees each as a function with one string, which is how it was taught to call.

Clients write such a tool as `{"type": "custom", "custom": {"name", "description", "format"}}`.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from quire.core.errors import ParameterError
from quire.frontend.grammar.schema import LARK
from quire.frontend.parsing.events import Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from quire.frontend.parsing.tools import Tool

INPUT = "input"
"""The string's name among the function's arguments."""

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_TEXT = re.compile(
    r"""(?:
    [^"\\] | \\[^u]
    | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]))  # a pair, or half of one
    )*""",
    re.VERBOSE,
)
"""JSON text within a string, up to the string's end or to an escape that is not whole."""


class CustomCallStart(Event, frozen=True, gc=False):
    """The model calls a custom tool; `index` counts as for functions, and a `ToolCallEnd` ends the call."""

    index: int
    id: str
    name: str


class CustomCallInput(Event, frozen=True, gc=False):
    """More of the text that the tool is called with."""

    index: int
    text: str


def as_function(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """Represents a custom tool as a function, in the form of chat completions.

    The text of a tool with a regular expression has to match it. A Lark grammar is described to the model here;
    `with_lark` enforces it.

    Raises:
        ParameterError: a tool without a name, or a format that is malformed.
    """
    custom = tool.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        raise ParameterError(f"tools[{index}] must be a custom tool with a name.", param="tools")
    syntax, definition = _grammar(custom, index)
    text: dict[str, Any] = {"type": "string"}
    described = custom.get("description") or ""
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif syntax == "lark":
        described += f"\n\nThe input must follow this Lark grammar:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function: dict[str, Any] = {"name": custom["name"], "parameters": parameters}
    if described:
        function["description"] = described.strip()
    if syntax is not None:
        function["strict"] = True
    return {"type": "function", "function": function}


def _grammar(custom: dict[str, Any], index: int) -> tuple[str | None, str]:
    """(syntax, definition) of the tool's grammar; no syntax where any text is allowed."""
    form = custom.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        raise ParameterError(f"The format of tools[{index}] must be of type text or grammar.", param="tools")
    if form["type"] == "text":
        return None, ""
    grammar = form.get("grammar", form)  # the Responses API has syntax and definition in the format itself
    if (
        not isinstance(grammar, dict)
        or grammar.get("syntax") not in ("lark", "regex")
        or not isinstance(grammar.get("definition"), str)
    ):
        raise ParameterError(
            f"The grammar of tools[{index}] needs a syntax, which is lark or regex, and a definition.", param="tools"
        )
    return grammar["syntax"], grammar["definition"]


def with_lark(function: Tool, custom: dict[str, Any]) -> Tool:
    """Adds the Lark grammar of a custom tool, if it has one, to the schema of its function."""
    syntax, definition = _grammar(custom, 0)
    if syntax != "lark" or function.parameters is None:
        return function
    text = {"type": "string", LARK: definition}
    return msgspec.structs.replace(function, parameters={**function.parameters, "properties": {INPUT: text}})


def arguments_of(text: str) -> str:
    """Represents a custom tool's `text` as arguments of its function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def with_functions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its calls of custom tools as calls of functions, which templates can read.

    Raises:
        ParameterError: a call that is malformed.
    """
    return [_with_functions(message, index) for index, message in enumerate(messages)]


def _with_functions(message: dict[str, Any], index: int) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(map(_is_custom, calls)):
        return message
    return {**message, "tool_calls": [_as_call(call, index) if _is_custom(call) else call for call in calls]}


def _is_custom(call: Any) -> bool:
    return isinstance(call, dict) and call.get("type") == "custom"


def _as_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    custom = call.get("custom")
    if not isinstance(custom, dict) or not all(isinstance(custom.get(name), str) for name in ("name", INPUT)):
        raise ParameterError(f"messages[{index}] has a custom call without name and input.", param="messages")
    function = {"name": custom["name"], "arguments": arguments_of(custom[INPUT])}
    return {"id": call.get("id"), "type": "function", "function": function}


class CustomCalls:
    """Turns calls of custom tools' functions back into events of the tools, in one answer.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._arguments: _ArgumentReader | None = None  # of the custom call that is being read

    def read(self, events: Sequence[Event]) -> list[Event]:
        """The same events, but for calls of custom tools."""
        read: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart) and event.name in self._names:
                self._arguments = _ArgumentReader()
                read.append(CustomCallStart(event.index, event.id, event.name))
            elif self._arguments is not None and isinstance(event, ToolCallArguments | ToolCallEnd):
                is_end = isinstance(event, ToolCallEnd)
                if text := self._arguments.end() if is_end else self._arguments.add(event.text):  # type: ignore[union-attr]
                    read.append(CustomCallInput(event.index, text))
                if is_end:
                    self._arguments = None
                    read.append(event)
            else:
                read.append(event)
        return read


class _ArgumentReader:
    """Reads the string out of a function's arguments while they grow."""

    def __init__(self) -> None:
        self._rest = ""  # not logged yet
        self._is_open = False  # within the string
        self._is_closed = False

    def add(self, arguments: str) -> str:
        """More of the string."""
        if self._is_closed:
            return ""
        self._rest += arguments
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open, self._rest = True, self._rest[opening.end() :]
        whole = _TEXT.match(self._rest)
        assert whole is not None
        self._rest = self._rest[whole.end() :]
        self._is_closed = self._rest.startswith('"')
        return _unescaped(whole[0])

    def end(self) -> str:
        """Returns the rest of the string. Arguments of another form are the text themselves."""
        if self._is_open or not self._rest:
            return ""
        try:
            arguments = json.loads(self._rest)
        except ValueError:
            return self._rest
        text = arguments.get(INPUT) if isinstance(arguments, dict) else None
        return text if isinstance(text, str) else self._rest


def _unescaped(text: str) -> str:
    decoded: str = json.loads(f'"{text}"', strict=False)
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

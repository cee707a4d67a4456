"""Checks clients' tools and messages, and reads tools into the form that parsers and constraints take."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.parsing.tools import Tool, ToolChoice


class ToolSet(Struct, frozen=True, kw_only=True):
    """The functions that a request offers, and its choice of calls."""

    described: list[dict[str, Any]] | None = None  # as the client wrote them, for templates
    functions: list[Tool] = []
    choice: ToolChoice = ToolChoice(mode="none")


def read_tool_set(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, max_calls: int | None = None
) -> ToolSet:
    """Tools and tool_choice, read from OpenAI's chat form.

    Args:
        max_calls: the most calls in an answer; None does not bound them.

    Raises:
        ParameterError: a tool or a choice that is wrong.
    """
    functions = read_tools(tools)
    return ToolSet(
        described=tools, functions=functions, choice=read_tool_choice(choice, functions, max_calls=max_calls)
    )


def read_tools(tools: Sequence[dict[str, Any]] | None) -> list[Tool]:
    """The functions that a request offers, in OpenAI's chat form.

    Raises:
        ParameterError: a tool that is no function, or two functions of one name.
    """
    read: list[Tool] = []
    names: set[str] = set()
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ParameterError(f"tools[{index}] must be a function with a name.", param="tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise ParameterError(f"tools[{index}] must be a function with a name.", param="tools")
        if parameters is not None and not isinstance(parameters, dict):
            raise ParameterError(f"tools[{index}].function.parameters must be a JSON schema.", param="tools")
        if name in names:
            raise ParameterError(f"tools has two functions called {name!r}.", param="tools")
        names.add(name)
        description = function.get("description")
        strict = bool(function.get("strict"))
        read.append(Tool(name=name, description=description, parameters=parameters, strict=strict))
    return read


def read_tool_choice(
    choice: str | dict[str, Any] | None, tools: Sequence[Tool], *, max_calls: int | None = None
) -> ToolChoice:
    """The client's choice of calls; `auto` by default, `none` without tools.

    Raises:
        ParameterError: an unknown choice, or one that the tools cannot satisfy.
    """
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise ParameterError(
                'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}.',
                param="tool_choice",
            )
        if all(name != tool.name for tool in tools):
            raise ParameterError(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
        return ToolChoice(mode="named", name=name, max_calls=max_calls)
    match choice:
        case None | "auto":
            return ToolChoice(mode="auto" if tools else "none", max_calls=max_calls)
        case "none":
            return ToolChoice(mode="none", max_calls=max_calls)
        case "required":
            if not tools:
                raise ParameterError("tool_choice is required, but there are no tools.", param="tool_choice")
            return ToolChoice(mode="required", max_calls=max_calls)
        case _:
            raise ParameterError(
                f"tool_choice must be none, auto, required or a function, got {choice!r}.", param="tool_choice"
            )


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Refuses messages without a role, and results of tools that were never called. Which roles there are, the template
    decides.

    Raises:
        ParameterError: the message, by its index.
    """
    called: set[Any] = set()
    num_calls = 0
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise ParameterError(
                f"messages[{index}] must be an object with a role, such as user; got {role!r}.", param="messages"
            )
        calls = message.get("tool_calls")
        if role == "assistant" and isinstance(calls, list):
            num_calls += len(calls)
            called |= {call.get("id") for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)}
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if call_id is not None and not isinstance(call_id, str):
                raise ParameterError(f"messages[{index}].tool_call_id must be a string.", param="messages")
            if not num_calls or (call_id is not None and called and call_id not in called):
                raise ParameterError(
                    f"messages hold a result of the call {call_id!r}, which no earlier assistant message makes.",
                    param="messages",
                )

"""Checks clients' tools and messages, and reads tools into the form that parsers and constraints take."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.chat.custom_tools import as_function, with_lark
from quire.frontend.parsing.tools import Tool, ToolChoice


class ToolSet(Struct, frozen=True, kw_only=True):
    """The functions that a request offers, and its choice of calls.

    Custom tools are functions, too. Tools that a server would run are left out, because this one runs none.
    """

    given: list[dict[str, Any]] = []  # as the client wrote them, without those that it may not call
    described: list[dict[str, Any]] | None = None  # all as functions, for templates
    functions: list[Tool] = []
    custom: frozenset[str] = frozenset()  # names of the functions that stand for custom tools
    choice: ToolChoice = ToolChoice(mode="none")

    @property
    def bounds_calls(self) -> bool:
        """True if an answer ends after a number of calls."""
        return self.choice.max_calls is not None and self.choice.mode != "none"


def read_tool_set(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, max_calls: int | None = None
) -> ToolSet:
    """Tools and tool_choice, read from OpenAI's chat form.

    Args:
        max_calls: the most calls in an answer; None does not bound them.

    Raises:
        ParameterError: a tool or a choice that is wrong.
    """
    offered, choice = _allowed(_offered(tools or ()), choice)
    functions = read_tools(offered)
    custom = {tool["custom"]["name"]: tool["custom"] for tool in tools or () if tool.get("type") == "custom"}
    names = {tool.name for tool in functions}
    return ToolSet(
        given=[tool for tool in tools or () if name_in(tool) in names],
        described=None if tools is None else offered,
        functions=[with_lark(tool, custom[tool.name]) if tool.name in custom else tool for tool in functions],
        custom=frozenset(custom),
        choice=read_tool_choice(choice, functions, max_calls=max_calls),
    )


def ignored_tools(tools: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    """Yields the ignored tools of a list in OpenAI's chat form: those that a server would run."""
    for index, tool in enumerate(tools or ()):
        if is_run_by_servers(tool):
            yield f"tools[{index}].{tool['type']}"


def is_run_by_servers(tool: dict[str, Any]) -> bool:
    """True if a server runs tools of this kind, such as web_search."""
    return isinstance(tool.get("type"), str) and tool["type"] not in ("function", "custom")


def _offered(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions that the model may call."""
    return [
        as_function(tool, index) if tool.get("type") == "custom" else tool
        for index, tool in enumerate(tools)
        if not is_run_by_servers(tool)
    ]


def _allowed(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools that a choice of type allowed_tools leaves, and the choice among them."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise ParameterError("tool_choice of type allowed_tools needs a list of tools.", param="tool_choice")
    names = {name_in(tool) for tool in allowed["tools"]}
    return [tool for tool in tools if name_in(tool) in names], allowed.get("mode", "auto")


def name_in(tool: Any) -> str | None:
    """The name in a function or custom tool, or in a choice of one."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    described = tool.get(kind) if isinstance(kind, str) else None
    name = described.get("name") if isinstance(described, dict) else None
    return name if isinstance(name, str) else None


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
        name = name_in(choice)
        if choice.get("type") not in ("function", "custom") or name is None:
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

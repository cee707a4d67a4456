"""Tools as the Responses API writes them, in the form of chat completions, and the names of calls on the way back.

A namespace holds functions. The model sees each under one flat name, as in vLLM: `namespace__function`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.core.errors import ParameterError
from quire.frontend.chat.tool_fields import is_run_by_servers, name_in

SEPARATOR = "__"


class CalledName(NamedTuple):
    """The name of a call, and the namespace that it is in."""

    name: str
    namespace: str | None = None


def flat_name(name: str, namespace: str | None) -> str:
    """The name that the model sees."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


class OfferedTools:
    """The tools of one request.

    Raises:
        ParameterError: a tool that is malformed.
    """

    def __init__(self, tools: Sequence[dict[str, Any]] | None) -> None:
        self.chat: list[dict[str, Any]] = []  # in the form of chat completions
        self._names: dict[str, CalledName] = {}  # by flat name, of functions in namespaces
        for index, tool in enumerate(tools or ()):
            if tool.get("type") == "namespace":
                self._add_namespace(tool, index)
            else:
                self.chat.append(_chat_tool(tool))

    def called(self, name: str) -> CalledName:
        """The client's name for a name that the model calls."""
        return self._names.get(name) or CalledName(name)

    def chat_choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """tool_choice in the form of chat completions.

        Raises:
            ParameterError: a choice of another kind, or of a tool that is ignored.
        """
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind in ("function", "custom"):
            return self._chosen(choice)
        if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
            allowed = [self._chosen(tool) for tool in choice["tools"] if isinstance(tool, dict)]
            return {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": allowed}}
        raise ParameterError(
            f"tool_choice of type {kind!r} is not supported; it can be none, auto, required, a function, a custom "
            "tool, or allowed_tools.",
            param="tool_choice",
        )

    def _add_namespace(self, tool: dict[str, Any], index: int) -> None:
        namespace, members = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace or not isinstance(members, list):
            raise ParameterError(f"tools[{index}] must be a namespace with a name and tools.", param="tools")
        for member in members:
            if not isinstance(member, dict) or not isinstance(member.get("name"), str):
                raise ParameterError(f"tools[{index}] has a tool without a name.", param="tools")
            name = flat_name(member["name"], namespace)
            self._names[name] = CalledName(member["name"], namespace)
            self.chat.append(_chat_tool({**member, "name": name}))

    def _chosen(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The choice of one tool. A name may lack its namespace if only one namespace has it."""
        kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str):
            name = flat_name(name, namespace)
        elif all(name_in(tool) != name for tool in self.chat):
            found = [flat for flat, called in self._names.items() if called.name == name]
            if len(found) > 1:
                raise ParameterError(
                    f"tool_choice names {name!r}, which several namespaces have: choose {' or '.join(found)}.",
                    param="tool_choice",
                )
            name = found[0] if found else name
        return {"type": kind, str(kind): {"name": name}}


def ignored_response_tools(tools: Sequence[dict[str, Any]] | None) -> Iterator[str]:
    """Yields the ignored tools, which a server would run."""
    for index, tool in enumerate(tools or ()):
        at = f"tools[{index}]"
        if tool.get("type") != "namespace":
            yield from _ignored(tool, at)
        elif isinstance(tool.get("tools"), list):
            for number, member in enumerate(tool["tools"]):
                if isinstance(member, dict):
                    yield from _ignored(member, f"{at}.tools[{number}]")


def _ignored(tool: dict[str, Any], at: str) -> Iterator[str]:
    if is_run_by_servers(tool):
        yield f"{at}.{tool['type']}"


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        return tool
    return {"type": kind, kind: {name: value for name, value in tool.items() if name != "type"}}

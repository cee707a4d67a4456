"""Custom tools, namespaces and tools of other servers: what the model is offered, and the names of its calls."""

import json
import random
from typing import Any

import msgspec
import pytest

from quire.core.errors import ParameterError
from quire.frontend.anthropic.schema import MessagesRequest
from quire.frontend.chat.custom_tools import CustomCallInput, CustomCalls, CustomCallStart, arguments_of
from quire.frontend.chat.tool_fields import ToolSet, read_tool_set
from quire.frontend.http.json_request import BodyReader
from quire.frontend.openai.responses.items import to_messages
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.openai.schema import ChatRequest
from quire.frontend.parsing.events import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Applies a patch."}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}


def ignored(body: dict[str, Any], kind: Any) -> str:
    return BodyReader(strict=False).read(msgspec.json.encode(body), kind)[1].header().decode()


class TestChat:
    def test_a_custom_tool_is_a_function_with_one_string(self) -> None:
        tools = read_tool_set([FUNCTION, PATCH], {"type": "custom", "custom": {"name": "patch"}})
        assert tools.custom == {"patch"}
        assert (tools.choice.mode, tools.choice.name) == ("named", "patch")
        [_, patch] = tools.functions
        assert patch.description == "Applies a patch."
        assert patch.parameters is not None
        assert patch.parameters["properties"] == {"input": {"type": "string"}}
        assert [tool["type"] for tool in tools.described or ()] == ["function", "function"]

    def test_a_regular_expression_is_enforced(self) -> None:
        form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}
        [tool] = read_tool_set([{"type": "custom", "custom": {"name": "x", "format": form}}], None).functions
        assert tool.strict
        assert tool.parameters is not None
        assert tool.parameters["properties"]["input"]["pattern"] == "^(?:a|b)$"

    def test_a_lark_grammar_is_told_to_the_model_and_enforced(self) -> None:
        offered = [FUNCTION, {"type": "custom", "custom": {"name": "x", "format": LARK}}]
        tools = read_tool_set(offered, None)
        [_, tool] = tools.functions
        assert 'start: "a"' in (tool.description or "")
        assert tool.strict
        assert tool.parameters is not None
        assert tool.parameters["properties"]["input"] == {"type": "string", "x-lark": 'start: "a"'}
        [_, described] = tools.described or ()
        assert described["function"]["parameters"]["properties"]["input"] == {"type": "string"}
        assert not ignored({"messages": [], "tools": offered}, ChatRequest)

    def test_tools_of_servers_are_left_out(self) -> None:
        offered = [{"type": "web_search"}, FUNCTION]
        tools = read_tool_set(offered, None)
        assert [tool.name for tool in tools.functions] == ["f"]
        assert tools.described == [FUNCTION]
        assert ignored({"messages": [], "tools": offered}, ChatRequest) == "tools[0].web_search"

    def test_allowed_tools(self) -> None:
        allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
        tools = read_tool_set([FUNCTION, PATCH], {"type": "allowed_tools", "allowed_tools": allowed})
        assert [tool.name for tool in tools.functions] == ["patch"]
        assert tools.choice.mode == "required"

    def test_calls_in_the_conversation_become_calls_of_functions(self) -> None:
        call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ]
        body = msgspec.json.encode({"messages": messages, "tools": [PATCH]})
        chat = BodyReader(strict=True).read(body, ChatRequest)[0].to_chat_input()
        [read] = chat.messages[0]["tool_calls"]
        assert read["type"] == "function"
        assert json.loads(read["function"]["arguments"]) == {"input": 'a "b"'}

    @pytest.mark.parametrize(
        "tool",
        [
            {"type": "custom"},
            {"type": "custom", "custom": {}},
            {"type": "custom", "custom": "patch"},
            {"type": "custom", "custom": {"name": "x", "format": "lark"}},
            {"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}},
            {"type": "custom", "custom": {"name": "x", "format": {"type": "grammar", "grammar": {"syntax": "bnf"}}}},
            {"type": ["function"]},
            {"function": {"name": "f"}},
        ],
    )
    def test_a_malformed_tool_is_refused(self, tool: dict[str, Any]) -> None:
        request, _ = BodyReader(strict=False).read(
            msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], "tools": [tool]}), ChatRequest
        )
        with pytest.raises(ParameterError) as caught:
            request.to_chat_input()
        assert caught.value.param == "tools"

    @pytest.mark.parametrize(
        "choice",
        [
            {"type": "web_search"},
            {"type": "custom", "custom": {"name": "other"}},
            {"type": ["custom"]},
            {"type": "allowed_tools"},
        ],
    )
    def test_a_choice_of_what_is_not_offered_is_refused(self, choice: dict[str, Any]) -> None:
        with pytest.raises(ParameterError) as caught:
            read_tool_set([FUNCTION, {"type": "web_search"}], choice)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("text", ["", 'a "b"\\c\nd', "😀é\u2028 \\u12 𝒳", '\\"' * 9])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_text_of_a_call_comes_in_pieces(text: str, ascii_only: bool, seed: int) -> None:
    arguments, cut = json.dumps({"input": text}, ensure_ascii=ascii_only), random.Random(seed)
    events: list[Any] = [ToolCallStart(0, "c", "patch")]
    while arguments:
        size = cut.randint(1, 4)
        events.append(ToolCallArguments(0, arguments[:size]))
        arguments = arguments[size:]
    events += [ToolCallEnd(0), ToolCallStart(1, "d", "f"), ToolCallArguments(1, "{}"), ToolCallEnd(1), TextDelta("x")]
    calls = CustomCalls({"patch"})
    told = [each for event in events for each in calls.read([event])]
    pieces = [each.text for each in told if isinstance(each, CustomCallInput)]
    assert "".join(pieces) == text
    assert len(pieces) >= len(text) / 4
    assert told[0] == CustomCallStart(0, "c", "patch")
    assert told[1 + len(pieces) :] == events[-5:]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("ls -l", "ls -l"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"input": "cut \\u12', "cut "),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\udc00"}', "\ufffd"),
    ],
)
def test_arguments_of_another_form_are_the_text(arguments: str, text: str) -> None:
    events = [ToolCallStart(0, "c", "patch"), ToolCallArguments(0, arguments), ToolCallEnd(0)]
    told = CustomCalls({"patch"}).read(events)
    assert "".join(each.text for each in told if isinstance(each, CustomCallInput)) == text


CRM = {
    "type": "namespace",
    "name": "crm",
    "tools": [{"type": "function", "name": "find"}, {"type": "mcp", "name": "m"}],
}
FILES = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "find"}]}


class TestResponses:
    def read(self, tools: list[dict[str, Any]], choice: Any = None) -> ToolSet:
        offered = OfferedTools(tools)
        return read_tool_set(offered.chat, offered.chat_choice(choice))

    def test_functions_of_a_namespace_have_flat_names(self) -> None:
        tools = [CRM, {"type": "function", "name": "f"}]
        assert [tool.name for tool in self.read(tools).functions] == ["crm__find", "f"]
        assert OfferedTools(tools).called("crm__find") == ("find", "crm")
        assert OfferedTools(tools).called("f") == ("f", None)

    @pytest.mark.parametrize(
        "choice", [{"name": "find"}, {"name": "crm__find"}, {"name": "find", "namespace": "crm"}], ids=str
    )
    def test_a_choice_may_name_the_namespace(self, choice: dict[str, Any]) -> None:
        assert self.read([CRM], {"type": "function", **choice}).choice.name == "crm__find"

    def test_an_ambiguous_choice_is_refused(self) -> None:
        with pytest.raises(ParameterError, match="crm__find or files__find"):
            self.read([CRM, FILES], {"type": "function", "name": "find"})

    @pytest.mark.parametrize(
        "choice",
        [
            {"type": "web_search"},
            {"type": "function", "name": "web_search"},
            {"type": "mcp", "server_label": "m"},
            {"type": ["function"], "name": "f"},
        ],
    )
    def test_a_choice_of_an_ignored_tool_is_refused(self, choice: dict[str, Any]) -> None:
        with pytest.raises(ParameterError) as caught:
            self.read([{"type": "web_search"}, {"type": "function", "name": "f"}], choice)
        assert caught.value.param == "tool_choice"

    def test_calls_in_the_conversation_have_the_same_names(self) -> None:
        items = [
            {"type": "function_call", "call_id": "1", "name": "find", "namespace": "crm", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
        ]
        turn, *results = to_messages(items)
        functions = [call["function"] for call in turn["tool_calls"]]
        assert functions == [
            {"name": "crm__find", "arguments": "{}"},
            {"name": "patch", "arguments": arguments_of("x")},
        ]
        assert [each["content"] for each in results] == ["a", "b"]

    def test_everything_about_tools_of_servers_is_listed(self) -> None:
        body = {
            "input": [{"type": "mcp_list_tools", "id": "x"}],
            "tools": [{"type": "file_search"}, CRM],
            "include": ["web_search_call.results", "reasoning.encrypted_content"],
        }
        assert ignored(body, ResponsesRequest) == (
            "tools[0].file_search, tools[1].tools[1].mcp, input[0].mcp_list_tools, include.web_search_call.results"
        )


class TestMessages:
    def test_tools_of_servers_are_left_out(self) -> None:
        tools = [
            {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "mcp_toolset", "mcp_server_name": "m"},
        ]
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "tools": tools}
        request, _ = BodyReader(strict=False).read(msgspec.json.encode(body), MessagesRequest)
        assert [tool.name for tool in request.to_chat_input().tools.functions] == ["f"]
        listed = ignored(body, MessagesRequest)
        assert listed.endswith("tools[1].web_search_20250305, tools[2].mcp_toolset")
        chosen = msgspec.json.encode({**body, "tool_choice": {"type": "tool", "name": "web_search"}})
        request, _ = BodyReader(strict=False).read(chosen, MessagesRequest)
        with pytest.raises(ParameterError, match="not among the tools"):
            request.to_chat_input()

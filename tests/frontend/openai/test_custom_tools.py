"""The real OpenAI client against the demo model: custom tools and namespaces."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.servers import ServerProcess
from tests.weather import QUESTION, REPLY, RESULT, WEATHER_FUNCTION, asked

CODE = r"[A-Z]{3}-\d{2}"
GRAMMAR = {"syntax": "regex", "definition": CODE}
CHAT_TOOL: Any = {
    "type": "custom",
    "custom": {"name": "look_up", "description": "Looks up a code.", "format": {"type": "grammar", "grammar": GRAMMAR}},
}
TOOL: Any = {
    "type": "custom", "name": "look_up", "description": "Looks up a code.", "format": {"type": "grammar", **GRAMMAR},
}  # fmt: skip
ASKED = "Look up ABC-12."


SUM = r"""
start: term ("+" term)~2
term: NUMBER | "(" NUMBER "-" QUOTED ")"
NUMBER: /[1-9][0-9]{0,2}/
QUOTED: /"[a-c]{1,3}"/
"""


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.base_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_calls_a_custom_tool(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "custom", "custom": {"name": "look_up"}},
        "temperature": 0,
    }
    message = client.chat.completions.create(**options).choices[0].message
    [call] = message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "look_up"
    assert re.fullmatch(CODE, call.custom.input)
    deltas = [
        delta.model_dump(exclude_unset=True)
        for chunk in client.chat.completions.create(**options, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "look_up")
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input
    options["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "It is a chair."}]
    assert client.chat.completions.create(**{**options, "tool_choice": "none"}).choices[0].finish_reason


def test_a_response_calls_a_custom_tool(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "quire-demo", "input": ASKED, "tools": [TOOL], "temperature": 0,
        "tool_choice": {"type": "custom", "name": "look_up"},
    }  # fmt: skip
    response = client.responses.create(**options)
    [call] = response.output
    assert (call.type, call.name) == ("custom_tool_call", "look_up")
    assert re.fullmatch(CODE, call.input)
    events = list(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == call.input
    assert kinds.index("response.output_item.added") < kinds.index("response.custom_tool_call_input.delta")
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "It is a chair."}
    after = client.responses.create(
        model="quire-demo", input=[output], previous_response_id=response.id, tools=[TOOL], tool_choice="none"
    )
    assert after.status == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "add"}], ids=str)
def test_a_text_follows_a_lark_grammar(client: openai.OpenAI, choice: Any) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": SUM}
    tools: Any = [{"type": "custom", "name": "add", "description": "Adds.", "format": form}]
    term = r'(?:[1-9]\d{0,2}|\([1-9]\d{0,2}-"[a-c]{1,3}"\))'
    for seed in range(4):
        response = client.responses.with_raw_response.create(
            model="quire-demo", input="Add something.", tools=tools, tool_choice=choice, extra_body={"seed": seed}
        )
        assert "X-Quire-Ignored-Fields" not in response.headers
        [call] = [item for item in response.parse().output if item.type == "custom_tool_call"][:1]
        assert re.fullmatch(rf"{term}(?:\+{term}){{2}}", call.input), call.input


def test_a_lark_grammar_that_cannot_be_read_is_refused(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: missing"}
    tools: Any = [{"type": "custom", "name": "add", "format": form}]
    with pytest.raises(openai.BadRequestError, match="unknown name 'missing'"):
        client.responses.create(model="quire-demo", input="Add.", tools=tools)


def test_calls_of_a_namespace_map_back(client: openai.OpenAI) -> None:
    tools: Any = [
        {"type": "namespace", "name": "world", "description": "", "tools": [{"type": "function", **WEATHER_FUNCTION}]}
    ]
    question: Any = {"role": "user", "content": QUESTION}
    choice: Any = {"type": "function", "name": "get_weather"}
    response = client.responses.create(
        model="quire-demo", input=[question], tools=tools, tool_choice=choice, temperature=0
    )
    [call] = response.output
    assert (call.type, call.name, call.namespace) == ("function_call", "get_weather", "world")
    assert json.loads(call.arguments) == asked("Paris")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    after = client.responses.create(
        model="quire-demo", input=[question, call.model_dump(), result], tools=tools, temperature=0
    )
    assert after.output_text == REPLY

"""Calls that `max_tokens` cuts short at any token: no markup is told as text, and the item says that it has no end."""

import json
from typing import Any

import httpx
import pytest

from tests.servers import ServerProcess
from tests.weather import QUESTION, WEATHER_FUNCTION

LIMITS = range(1, 32, 2)
"""The demo model's call has less than 30 tokens."""
CHOICES = ["required", "named"]


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.base_url + path, json={"model": "quire-demo", "temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    told = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in told if each != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_responses(demo_server: ServerProcess, choice: str, stream: bool) -> None:
    wanted: Any = "required" if choice == "required" else {"type": "function", "name": "get_weather"}
    tools = [{"type": "function", **WEATHER_FUNCTION}]
    seen = set()
    for limit in LIMITS:
        body = {"input": QUESTION, "tools": tools, "tool_choice": wanted, "max_output_tokens": limit, "stream": stream}
        answer = post(demo_server, "/v1/responses", {**body, "parallel_tool_calls": False})
        response = answer[-1]["response"] if stream else answer
        calls = response["output"]
        assert [item["type"] for item in calls] in ([], ["function_call"])
        for call in calls:
            is_whole = call["arguments"].endswith("}") and response["status"] == "completed"
            assert call["status"] == ("completed" if is_whole else "incomplete") == response["status"]
            seen.add(call["status"])
        if stream:
            done = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
            assert done == calls
            assert not any(event["type"].startswith("response.output_text") for event in answer)
            deltas = [event["delta"] for event in answer if event["type"] == "response.function_call_arguments.delta"]
            assert "".join(deltas) == "".join(call["arguments"] for call in calls) or not deltas
    assert seen == {"completed", "incomplete"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_messages(demo_server: ServerProcess, choice: str, stream: bool) -> None:
    wanted = {"type": "any"} if choice == "required" else {"type": "tool", "name": "get_weather"}
    tools = [{"name": "get_weather", "input_schema": WEATHER_FUNCTION["parameters"]}]
    ends = []
    for limit in LIMITS:
        body = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools, "max_tokens": limit}
        body |= {"tool_choice": {**wanted, "disable_parallel_tool_use": True}, "stream": stream}
        answer = post(demo_server, "/v1/messages", body)
        if stream:
            blocks = [event["content_block"] for event in answer if event["type"] == "content_block_start"]
            deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
            assert {delta["type"] for delta in deltas} <= {"input_json_delta"}
            ends += [event["delta"]["stop_reason"] for event in answer if event["type"] == "message_delta"]
        else:
            blocks = answer["content"]
            ends.append(answer["stop_reason"])
        assert [block["type"] for block in blocks] in ([], ["tool_use"])
    assert len(ends) == len(LIMITS)
    assert (ends[0], ends[-1]) == ("max_tokens", "tool_use")


def test_a_call_that_was_complete_before_the_limit_is_completed(demo_server: ServerProcess) -> None:
    """A second call is cut, or the answer ends with the first."""
    body: dict[str, Any] = {"input": QUESTION, "tools": [{"type": "function", **WEATHER_FUNCTION}]}
    body["tool_choice"] = "required"
    whole = post(demo_server, "/v1/responses", body)
    assert [item["status"] for item in whole["output"]] == ["completed"]
    limit = whole["usage"]["output_tokens"] - 1  # the token that is missing is the end of the answer
    cut = post(demo_server, "/v1/responses", {**body, "max_output_tokens": limit})
    assert (cut["status"], [item["status"] for item in cut["output"]]) == ("incomplete", ["completed"])


STOP = "ris"
"""Lies within the call's arguments."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "left"), [(STOP, '{"city":"Pa'), ('"Pa', "")])
def test_a_stop_string_within_a_call_ends_a_chat_with_stop(
    demo_server: ServerProcess, stop: str, left: str, stream: bool
) -> None:
    tools = [{"type": "function", "function": WEATHER_FUNCTION}]
    body = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools, "stop": [stop], "stream": stream}
    for choice in "required", "auto":
        answer = post(demo_server, "/v1/chat/completions", {**body, "tool_choice": choice})
        told = answer[-1]["choices"][0] if stream else answer["choices"][0]
        assert (told["finish_reason"], told["stop_reason"]) == ("stop", stop)
        if not stream:
            [call] = told["message"]["tool_calls"]
            assert call["function"]["arguments"].replace(" ", "") == left


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_leaves_an_incomplete_item(demo_server: ServerProcess, stream: bool) -> None:
    body = {"input": QUESTION, "tools": [{"type": "function", **WEATHER_FUNCTION}], "tool_choice": "required"}
    answer = post(demo_server, "/v1/responses", {**body, "stop": [STOP], "stream": stream})
    response = answer[-1]["response"] if stream else answer
    [call] = response["output"]
    assert (response["status"], call["type"], call["status"]) == ("completed", "function_call", "incomplete")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_is_a_messages_reason(demo_server: ServerProcess, stream: bool) -> None:
    tools = [{"name": "get_weather", "input_schema": WEATHER_FUNCTION["parameters"]}]
    body = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools, "tool_choice": {"type": "any"}}
    answer = post(demo_server, "/v1/messages", {**body, "max_tokens": 60, "stop_sequences": [STOP], "stream": stream})
    told = answer[-2]["delta"] if stream else answer
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", STOP)

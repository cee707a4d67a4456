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
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


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

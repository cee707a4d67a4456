"""The metric of searches for calls: one for each answer, in streams one for each piece."""

from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.servers import ServerProcess
from tests.weather import QUESTION, WEATHER_FUNCTION

NAME = "vllm:tool_call_parser_invocations"
FUNCTION = {"type": "function", "function": WEATHER_FUNCTION}
MESSAGE = {"role": "user", "content": QUESTION}
CHAT = {"messages": [MESSAGE], "tools": [FUNCTION], "temperature": 0}


def counts(base_url: str) -> Counter[tuple[str, str, str]]:
    text = httpx.get(f"{base_url}/metrics").text
    [family] = [each for each in text_string_to_metric_families(text) if each.name == NAME]
    values: Counter[tuple[str, str, str]] = Counter()
    for sample in family.samples:
        assert sample.name == f"{NAME}_total"
        assert sample.labels.pop("model_name") == "quire-demo"
        values[sample.labels["mode"], sample.labels["outcome"], sample.labels["request_type"]] = int(sample.value)
    assert len(values) == 2 * 2 * 3
    return values


@pytest.mark.parametrize(
    ("path", "body", "kind", "found"),
    [
        ("/v1/chat/completions", CHAT, "chat_completions", True),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "Hello!"}]},
            "chat_completions",
            False,
        ),
        (
            "/v1/responses",
            {"input": [MESSAGE], "tools": [{"type": "function", **WEATHER_FUNCTION}], "temperature": 0},
            "responses",
            True,
        ),
        (
            "/v1/messages",
            {
                "messages": [MESSAGE],
                "max_tokens": 60,
                "tools": [{"name": "get_weather", "input_schema": WEATHER_FUNCTION["parameters"]}],
            },
            "chat_completions",
            True,
        ),
    ],
)
def test_searches_are_counted(
    demo_server: ServerProcess, path: str, body: dict[str, Any], kind: str, found: bool
) -> None:
    url = demo_server.base_url
    before = counts(url)
    assert httpx.post(url + path, json={"model": "quire-demo", **body}, timeout=60).status_code == 200
    whole = counts(url)
    assert whole - before == {("non_streaming", "tool_call" if found else "no_tool_call", kind): 1}
    httpx.post(url + path, json={"model": "quire-demo", "stream": True, **body}, timeout=60).read()
    pieces = counts(url) - whole
    assert {key[0] for key in pieces} == {"streaming"}
    assert {key[2] for key in pieces} == {kind}
    assert (pieces["streaming", "tool_call", kind] > 0) == found
    assert pieces.total() >= 1  # one for each delta: tokens that wait for a slow client are one


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}], ids=str)
def test_an_answer_without_functions_is_not_searched(demo_server: ServerProcess, fields: dict[str, Any]) -> None:
    before = counts(demo_server.base_url)
    body = {"model": "quire-demo", **CHAT, **fields, "max_tokens": 20}
    assert httpx.post(f"{demo_server.base_url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert counts(demo_server.base_url) == before


def test_a_server_without_a_parser_has_no_such_metric(base_url: str) -> None:
    assert NAME not in httpx.get(f"{base_url}/metrics").text

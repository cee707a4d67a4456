"""What vLLM's own tests of the Responses API require, asked of our server; here are those that no other test asks."""

import json
from typing import Any

import httpx
import pytest

from tests.servers import ServerProcess
from tests.weather import QUESTION, WEATHER_FUNCTION

TOOLS: list[Any] = [{"type": "function", **WEATHER_FUNCTION}]
THINK = "What is 47 + 38? Think step by step."
PARIS = "What is the capital of France?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def url(demo_server: ServerProcess) -> str:
    return f"{demo_server.base_url}/v1/responses"


def ask(url: str, given: Any, **fields: Any) -> httpx.Response:
    body = {"model": "quire-demo", "temperature": 0, "max_output_tokens": 60, "input": given, **fields}
    return httpx.post(url, json=body, timeout=60)


def events_of(url: str, given: Any, **fields: Any) -> list[dict[str, Any]]:
    text = ask(url, given, stream=True, **fields).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def reasoning(**more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "encrypted_content": None, **more}


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
@pytest.mark.parametrize("content", [[{"type": "output_text", "text": "The capital of Fr"}], "The capital of Fr"])
def test_in_progress_message_is_continued(url: str, status: str, content: Any) -> None:
    begun = {"role": "assistant", "status": status, "content": content}
    whole = ask(url, [user(PARIS), begun]).json()
    assert whole["output"][0]["content"][0]["text"] == "ance is Paris."
    assert events_of(url, [user(PARIS), begun])[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    count = {"model": "quire-demo", "input": [user(PARIS), begun]}
    counted = httpx.post(f"{url}/input_tokens", json=count, timeout=60).json()
    assert counted["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.parametrize(
    "last",
    [
        pytest.param([assistant("The capital of Fr", status="completed")], id="completed_message"),
        pytest.param([assistant("The capital of Fr")], id="without_status"),
        pytest.param([assistant("The capital of Fr", status=None)], id="none_status"),
        pytest.param([assistant("No", status="in_progress"), user(PARIS)], id="only_last_item_matters"),
        pytest.param([assistant("", status="in_progress")], id="nothing_to_go_on_with"),
        pytest.param([reasoning(status="completed")], id="completed_reasoning"),
    ],
)
def test_other_inputs_are_answered_by_a_new_message(url: str, last: list[Any]) -> None:
    [*_, item] = ask(url, [user(PARIS), *last]).json()["output"]
    assert item["content"][0]["text"] != "ance is Paris."


@pytest.mark.parametrize("stream", [False, True])
def test_enable_response_messages(url: str, stream: bool) -> None:
    fields = {"enable_response_messages": True, "tools": TOOLS}
    told = events_of(url, QUESTION, **fields)[-1]["response"] if stream else ask(url, QUESTION, **fields).json()
    [read], [written] = told["input_messages"], told["output_messages"]
    assert read["type"] == written["type"] == "raw_message_tokens"
    assert QUESTION in read["message"]
    assert "get_weather" in read["message"]
    assert "Paris" in written["message"]  # the call as the model wrote it
    counts = (told["usage"]["input_tokens"], told["usage"]["output_tokens"])
    assert (len(read["tokens"]), len(written["tokens"])) == counts
    detokenized = httpx.post(url.replace("v1/responses", "detokenize"), json={"tokens": read["tokens"]}, timeout=60)
    assert detokenized.json()["prompt"] == read["message"]


def test_response_messages_are_told_on_request_alone_and_hide_what_is_hidden(url: str) -> None:
    assert not {"input_messages", "output_messages"} & ask(url, "Hello!").json().keys()
    hidden = ask(url, THINK, enable_response_messages=True, include_reasoning=False).json()
    assert (len(hidden["input_messages"]), hidden["output_messages"]) == (1, [])


def test_every_text_delta_has_its_logprobs(url: str) -> None:
    events = events_of(url, PARIS, include=["message.output_text.logprobs"], top_logprobs=3)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    tokens = [entry["token"] for delta in deltas for entry in delta["logprobs"]]
    assert "".join(tokens) == "".join(delta["delta"] for delta in deltas) == "The capital of France is Paris."
    for delta in deltas:
        assert delta["logprobs"]
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3 for entry in delta["logprobs"])


def test_logprobs_of_a_text_have_no_token_that_ended_it(url: str) -> None:
    [message] = ask(url, PARIS, include=["message.output_text.logprobs"]).json()["output"]
    [part] = message["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "The capital of France is Paris."


@pytest.mark.parametrize("fields", [{"given": THINK}, {"given": QUESTION, "tools": TOOLS}, {"given": PARIS}])
def test_every_done_closes_what_was_begun_last(url: str, fields: dict[str, Any]) -> None:
    """`validate_streaming_event_stack`"""
    begun: list[str] = []
    for event in events_of(url, max_output_tokens=200, **fields):
        stem, _, end = event["type"].rpartition(".")
        if end == "created" or end == "added" or (end == "delta" and begun[-1] != f"{stem}.delta"):
            begun.append(event["type"])
        elif end == "completed":
            assert begun.pop() == "response.created"
        elif end == "done":
            assert begun.pop() in (f"{stem}.added", f"{stem}.delta")
    assert begun == []


def test_response_created_event_spells_the_schema_as_the_request(url: str) -> None:
    form = {"type": "json_schema", "name": "event", "schema": SCHEMA, "strict": True, "description": "An event."}
    [created, *_] = events_of(url, "Hello!", text={"format": form})
    assert created["response"]["text"]["format"] == form


@pytest.mark.parametrize(
    "items",
    [
        pytest.param([user("a"), assistant("b", id="m", status="completed"), reasoning(id="r"), user("c")], id="ids"),
        pytest.param([user("a"), assistant("b"), reasoning(), user("c")], id="without_ids"),
        pytest.param(
            [user("a"), reasoning(id="x", content=[{"type": "reasoning_text", "text": "b"}])], id="reasoning_item"
        ),
        pytest.param([user("a"), assistant("b", content=[]), user("c")], id="empty_content"),
        pytest.param([{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], id="chat_with_input_type"),
        pytest.param(
            [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]}, user("a")],
            id="developer_messages",
        ),
    ],
)  # fmt: skip
def test_histories_that_clients_replay_are_read(url: str, items: list[Any]) -> None:
    answer = ask(url, items)
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
    ids=["function_call_without_call_id", "structured_outputs_and_text_format", "least_seed", "largest_seed"],
)
def test_refused(url: str, fields: dict[str, Any], param: str) -> None:
    answer = ask(url, **{"given": "Hello!", **fields}) if "input" not in fields else ask(url, fields["input"])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param

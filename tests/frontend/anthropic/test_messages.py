"""The real Anthropic client against the demo model, and details that only raw HTTP shows."""

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from quire.core.errors import ParameterError
from quire.frontend.anthropic.content import to_messages
from tests.servers import ServerProcess
from tests.weather import QUESTION, REPLY, RESULT, WEATHER_FUNCTION, asked

WEATHER: Any = {
    "name": WEATHER_FUNCTION["name"],
    "description": WEATHER_FUNCTION["description"],
    "input_schema": WEATHER_FUNCTION["parameters"],
}
GREEDY = {"temperature": 0}
THINK = "What is 47 + 38? Think step by step."


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_server.base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, content: Any, **options: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    options = {"max_tokens": 200, "extra_body": GREEDY, **options}
    return client.messages.create(model="quire-demo", messages=messages, **options)


def test_a_text_in_and_out(client: anthropic.Anthropic) -> None:
    message = ask(client, "What is the capital of France?", system=[{"type": "text", "text": "Be brief."}])
    [block] = message.content
    assert block.text == "The capital of France is Paris."
    assert (message.role, message.model, message.stop_reason) == ("assistant", "quire-demo", "end_turn")
    assert message.usage.output_tokens > 0
    assert message.id.startswith("msg_")


def test_agent_loop(client: anthropic.Anthropic) -> None:
    first = ask(client, QUESTION, tools=[WEATHER])
    [use] = first.content
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", asked("Paris"))
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": RESULT}]}
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = ask(client, turns, tools=[WEATHER])
    assert [block.text for block in second.content] == [REPLY]


def num_read(message: anthropic.types.Message) -> int:
    """Tokens of the prompt, those that the prefix cache had included."""
    assert message.usage.cache_read_input_tokens is not None
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_usage_tells_what_the_prefix_cache_had(client: anthropic.Anthropic) -> None:
    question = "How many letters has the word caterpillar, if I may ask that of you today?"
    first, second = ask(client, question, max_tokens=1), ask(client, question, max_tokens=1)
    assert num_read(first) == num_read(second)
    assert second.usage.cache_read_input_tokens > 0
    assert second.usage.input_tokens < num_read(second)


def test_streamed_text_thinking_and_calls_add_up(client: anthropic.Anthropic) -> None:
    for question, tools in ((THINK, anthropic.omit), (QUESTION, [WEATHER])):
        whole = ask(client, question, tools=tools)
        with client.messages.stream(
            model="quire-demo",
            max_tokens=200,
            messages=[{"role": "user", "content": question}],
            tools=tools,
            extra_body=GREEDY,
        ) as stream:
            streamed = stream.get_final_message()
        assert streamed.stop_reason == whole.stop_reason
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert num_read(streamed) == num_read(whole)
        for one, other in zip(whole.content, streamed.content, strict=True):
            ours, theirs = ({k: v for k, v in block.model_dump().items() if k != "id"} for block in (one, other))
            assert ours.items() <= theirs.items()
    assert [block.type for block in ask(client, THINK).content] == ["thinking", "text"]


def test_events_in_order(demo_server: ServerProcess) -> None:
    body = {
        "model": "quire-demo",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": THINK}],
        "stream": True,
        **GREEDY,
    }
    with httpx.stream("POST", demo_server.base_url + "/v1/messages", json=body) as answer:
        frames = "".join(answer.iter_text()).removesuffix("\n\n").split("\n\n")
    pairs = [frame.split("\n") for frame in frames]
    data = [json.loads(line.removeprefix("data: ")) for _, line in pairs]
    assert [f"event: {event['type']}" for event in data] == [name for name, _ in pairs]
    kinds = [event["type"] for event in data]
    steps = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert steps == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["usage"]["input_tokens"] > 0
    deltas = [event["delta"]["type"] for event in data if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
    assert [event["index"] for event in data if event["type"] == "content_block_start"] == [0, 1]


def test_thinking_when_asked_and_no_longer_than_its_budget(client: anthropic.Anthropic) -> None:
    question = "Reverse the word planet."
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    thought, answer = ask(client, question, thinking=thinking, max_tokens=1500).content
    assert (thought.type, answer.text) == ("thinking", "tenalp")
    assert [block.type for block in ask(client, question, thinking={"type": "disabled"}).content] == ["text"]


def test_thinking_can_be_left_out(client: anthropic.Anthropic) -> None:
    told, hidden = (
        ask(client, THINK, max_tokens=1500, thinking={"type": "enabled", "budget_tokens": 1024, "display": display})
        for display in ("summarized", "omitted")
    )
    assert [block.type for block in told.content] == ["thinking", "text"]
    assert hidden.content == told.content[1:]
    assert num_read(hidden) == num_read(told)
    assert hidden.usage.output_tokens == told.usage.output_tokens


def test_a_call_that_is_asked_for_is_made(client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        message = ask(client, "Hello!", tools=[WEATHER], tool_choice=choice)
        assert message.stop_reason == "tool_use"
        assert message.content[0].name == "get_weather"


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    stopped = ask(client, "What is the capital of France?", stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert stopped.content[0].text.startswith("The capital of France")
    assert ask(client, "What is the capital of France?", max_tokens=2).stop_reason == "max_tokens"
    cut = ask(client, QUESTION, tools=[WEATHER], stop_sequences=["Paris"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].input) == ("stop_sequence", "Paris", {}), (
        "not to be made"
    )
    whole = ask(client, QUESTION, tools=[WEATHER], stop_sequences=["</tool_call>"])
    assert (whole.stop_reason, whole.content[0].input) == ("tool_use", asked("Paris"))


def test_tokens_are_counted_as_they_are_served(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    count = client.messages.count_tokens(model="quire-demo", messages=messages, tools=[WEATHER], system="Be brief.")
    served = ask(client, QUESTION, tools=[WEATHER], system="Be brief.", max_tokens=1)
    assert count.input_tokens == num_read(served) == count.context_management["original_input_tokens"]  # type: ignore[attr-defined]
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"'image'.*text only"):
        client.messages.count_tokens(model="quire-demo", messages=[{"role": "user", "content": [image]}])


def test_more_tokens_than_there_is_room_for_are_lowered(
    client: anthropic.Anthropic, demo_server: ServerProcess
) -> None:
    assert ask(client, "What is the capital of France?", max_tokens=16_000).stop_reason == "end_turn"
    body = {"model": "quire-demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a " * 20_000}]}
    answer = httpx.post(demo_server.base_url + "/v1/messages", json=body)
    assert answer.status_code == 400
    assert "shorten" in answer.json()["error"]["message"]


def test_a_message_of_the_assistants_is_gone_on_with(client: anthropic.Anthropic) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = {"role": "assistant", "content": [{"type": "text", "text": "The capital of"}]}
    message = client.messages.create(
        model="quire-demo",
        max_tokens=30,
        messages=[question, begun],
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    )
    assert [block.text for block in message.content] == [" France is Paris."]


def test_system_messages_within_a_conversation(client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "system", "content": "Answer briefly."},
    ]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}
    counted = [
        client.messages.count_tokens(model="quire-demo", messages=messages, system=system).input_tokens
        for system in ([billing, {"type": "text", "text": "Be kind."}], "Be kind.")
    ]
    assert counted[0] == counted[1]
    assert "Paris" in client.messages.create(model="quire-demo", max_tokens=40, messages=messages).content[-1].text


def test_edits_of_the_conversation_are_ignored_in_plain_sight(demo_server: ServerProcess) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
    body = {"model": "quire-demo", "messages": [{"role": "user", "content": "a"}]}
    for path, more in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {})):
        managed = {**body, **more, "context_management": {"edits": edits}}
        answer = httpx.post(demo_server.base_url + path, json=managed)
        assert answer.status_code == 200
        assert answer.headers["x-quire-ignored-fields"] == "context_management.edits[1].clear_tool_uses_20250919"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_is_told_to_go_on_without_a_thread(client: anthropic.Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, "Hello!", stream=stream, extra_body={"thread": {"type": "create"}})
    assert caught.value.body["error"]["details"] == {  # type: ignore[index]
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_models_in_anthropics_form(client: anthropic.Anthropic, demo_server: ServerProcess) -> None:
    [model] = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "quire-demo", "quire-demo")
    assert model.created_at.year > 2000
    assert client.models.retrieve("quire-demo") == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert httpx.get(demo_server.base_url + "/v1/models/other").json()["error"]["code"] == 404
    page = httpx.get(demo_server.base_url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert set(page) == {"data", "has_more", "first_id", "last_id"}
    assert httpx.get(demo_server.base_url + "/v1/models").json()["object"] == "list"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "other"}, "not served here"),
        ({"model": ""}, "model must name"),
        ({"max_tokens": 0}, "max_tokens must be between"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image', but .* text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "no earlier"),
        ({"tool_choice": {"type": "tool"}}, "needs a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "at least 1024"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(demo_server: ServerProcess, options: Any, said: str, stream: bool) -> None:
    body = {"model": "quire-demo", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "stream": stream}
    answer = httpx.post(demo_server.base_url + "/v1/messages", json={**body, **options})
    assert answer.status_code == (404 if options.get("model") else 400)
    error = answer.json()
    assert set(error) == {"type", "error"}
    assert error["type"] == "error"
    assert error["error"]["type"] == ("not_found_error" if options.get("model") else "invalid_request_error")
    assert re.search(said, error["error"]["message"]), error


def test_blocks_of_a_turn_become_messages() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"ä": [1]}},
    ]
    [turn] = to_messages("assistant", blocks, 0)
    assert turn["reasoning_content"] == "Hm."
    assert turn["content"] == "Let me look."
    assert turn["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"ä": [1]}'}}]
    results = [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}, {"type": "text", "text": "And now?"}]
    assert [message["role"] for message in to_messages("user", results, 1)] == ["tool", "user"]
    failed = [{"type": "tool_result", "tool_use_id": "1", "content": "no such file", "is_error": True}]
    assert to_messages("user", failed, 1)[0]["is_error"] is True


@pytest.mark.parametrize(
    ("role", "block", "said"),
    [
        ("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}, "of type 'tool_use'"),
        ("user", {"type": "thinking", "thinking": "Hm."}, "of type 'thinking'"),
        ("user", {"type": "redacted_thinking", "data": "x"}, "of type 'redacted_thinking'"),
        ("assistant", {"type": "redacted_thinking"}, "data must be a string"),
        ("assistant", {"type": "tool_result", "tool_use_id": "1"}, "of type 'tool_result'"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "is_error": "no"}, "is_error must be true or false"),
    ],
)
def test_blocks_in_the_wrong_place_or_form_are_named(role: str, block: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=rf"messages\[2\].content\[0\].*{said}"):
        to_messages(role, [block], 2)

"""The real OpenAI client against the demo model: the Responses API."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.servers import ServerProcess
from tests.weather import QUESTION, REPLY, RESULT, WEATHER_FUNCTION, asked

WEATHER: Any = {"type": "function", "strict": False, **WEATHER_FUNCTION}
THINK = "What is 47 + 38? Think step by step."


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.base_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, given: Any, **options: Any) -> Any:
    return client.responses.create(**{"model": "quire-demo", "input": given, "temperature": 0, **options})


def wait(client: openai.OpenAI, response_id: str) -> Any:
    for _ in range(3000):
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        time.sleep(0.02)
    raise AssertionError("the response is still made")


def test_a_text_in_and_out(client: openai.OpenAI) -> None:
    response = ask(client, "What is the capital of France?", metadata={"a": "b"})
    assert response.output_text == "The capital of France is Paris."
    assert (response.status, response.model, response.metadata) == ("completed", "quire-demo", {"a": "b"})
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.presence_penalty, response.frequency_penalty) == (0, 0)
    assert response.usage.input_tokens_details.cache_write_tokens == 0


def test_what_a_request_says_of_caching_and_its_user_is_told_again(client: openai.OpenAI) -> None:
    told: Any = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"}
    options: Any = {"mode": "explicit", "prewarm": False, "comparison_response_id": "resp_1"}
    response = ask(client, "Hi.", **told, prompt_cache_options=options, max_output_tokens=2)
    assert {name: getattr(response, name) for name in told} == told
    cached = response.prompt_cache_options
    assert (cached.mode, cached.ttl, cached.comparison_response_id) == ("explicit", "30m", "resp_1")
    assert client.responses.retrieve(response.id).prompt_cache_key == "k"
    older = ask(client, "Hi.", prompt_cache_retention="in-memory", max_output_tokens=2)
    assert older.prompt_cache_retention == "in_memory"
    assert "prompt_cache_options" not in older.model_fields_set
    assert (older.prompt_cache_key, older.safety_identifier) == (None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_details_of_usage_are_numbers_alone(client: openai.OpenAI, stream: bool) -> None:
    """OpenAI's agents library for JavaScript takes nothing else."""
    answer = ask(client, "Hi.", max_output_tokens=2, stream=stream)
    usage = (list(answer)[-1].response if stream else answer).usage
    for details in (usage.input_tokens_details, usage.output_tokens_details):
        assert {type(value) for value in details.model_dump(exclude_unset=True).values()} == {int}


def test_agent_loop(client: openai.OpenAI) -> None:
    first = ask(client, QUESTION, tools=[WEATHER])
    [call] = first.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == asked("Paris")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    by_reference = ask(client, [result], previous_response_id=first.id, tools=[WEATHER])
    user = {"role": "user", "content": QUESTION}
    by_value = ask(client, [user, *(item.model_dump() for item in first.output), result], tools=[WEATHER], store=False)
    assert by_reference.output_text == by_value.output_text == REPLY
    assert by_reference.previous_response_id == first.id


def test_conversations_go_on_without_their_instructions(client: openai.OpenAI) -> None:
    first = ask(client, "My name is Anna.", instructions="Be brief.")
    second = ask(client, "What is my name?", previous_response_id=first.id)
    assert second.output_text == "Your name is Anna."
    assert second.instructions is None
    third = ask(client, "What is my name?", previous_response_id=second.id, instructions="Be brief.")
    assert third.usage.input_tokens > second.usage.input_tokens


def test_events_in_order(client: openai.OpenAI) -> None:
    events = list(ask(client, THINK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    steps = [kind for i, kind in enumerate(kinds) if not kind.endswith("delta") or kind != kinds[i - 1]]
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    assert steps == [
        *("response.created", "response.in_progress"),
        *(*item, "response.reasoning_text.delta", "response.reasoning_text.done", *done),
        *(*item, "response.output_text.delta", "response.output_text.done", *done),
        "response.completed",
    ]
    final = events[-1].response
    for kind in ("reasoning_text", "output_text"):
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        [text] = [event.text for event in events if event.type == f"response.{kind}.done"]
        assert deltas == text
    assert final.output_text == "47 + 38 = 85"
    whole = ask(client, THINK)
    assert [item.content[0].text for item in final.output] == [item.content[0].text for item in whole.output]
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_events_of_a_call(client: openai.OpenAI) -> None:
    with client.responses.stream(model="quire-demo", input=QUESTION, tools=[WEATHER], temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    [arguments] = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == arguments.arguments == final.output[0].arguments
    assert json.loads(arguments.arguments) == asked("Paris")
    assert not any(event.type == "response.output_text.delta" for event in events)


def test_calls_that_are_asked_for_and_no_more_than_allowed(client: openai.OpenAI) -> None:
    options: Any = {"tools": [WEATHER], "max_output_tokens": 400}
    several = ask(client, "Hello!", tool_choice="required", **options).output
    assert {item.type for item in several} == {"function_call"}
    named = ask(client, "Hello!", tool_choice={"type": "function", "name": "get_weather"}, max_tool_calls=1, **options)
    assert [item.name for item in named.output] == ["get_weather"]


def test_tokens_of_the_input_are_counted_as_they_are_served(client: openai.OpenAI) -> None:
    options: Any = {"model": "quire-demo", "input": QUESTION, "tools": [WEATHER], "instructions": "Be brief."}
    count = client.responses.input_tokens.count(**options)
    served = client.responses.create(**options, max_output_tokens=1)
    assert (count.object, count.input_tokens) == ("response.input_tokens", served.usage.input_tokens)


def test_items_of_the_input_come_in_pages(client: openai.OpenAI) -> None:
    first = ask(client, "Hello!", max_output_tokens=5)
    second = ask(client, [{"role": "user", "content": "And?"}], previous_response_id=first.id, max_output_tokens=5)
    pages = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert pages.has_more
    items = list(pages)
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[0].content[0].text == "Hello!"
    assert len({item.id for item in items}) == 3
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in reversed(items)]
    with pytest.raises(openai.BadRequestError, match="no item"):
        client.responses.input_items.list(second.id, after="msg_none")
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")


def test_background(client: openai.OpenAI) -> None:
    queued = ask(client, "What is the capital of France?", background=True)
    assert queued.status in ("queued", "in_progress")
    assert wait(client, queued.id).output_text == "The capital of France is Paris."
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        client.responses.cancel(queued.id)


def test_a_background_stream_can_be_left_and_followed_again(client: openai.OpenAI) -> None:
    stream = ask(client, "What is the capital of France?", background=True, stream=True)
    created = next(iter(stream))
    stream.close()
    response_id = created.response.id
    whole = wait(client, response_id)
    again = list(client.responses.retrieve(response_id, stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == list(range(4, 4 + len(again)))
    assert again[-1].type == "response.completed"
    assert again[-1].response.output_text == whole.output_text == "The capital of France is Paris."

    with pytest.raises(openai.BadRequestError, match="starting_after: Expected `int") as caught:
        client.responses.retrieve(response_id, stream=True, starting_after="soon")  # type: ignore[call-overload]
    assert caught.value.param == "starting_after"


def test_cancel(client: openai.OpenAI, demo_server: ServerProcess) -> None:
    endless = ask(client, "Hello", background=True, max_output_tokens=1900, extra_body={"ignore_eos": True})
    cancelled = client.responses.cancel(endless.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(endless.id).status == "cancelled"
    metrics = ""
    for _ in range(1200):
        metrics = httpx.get(demo_server.base_url + "/metrics").text
        if all(line.endswith(" 0.0") for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the engine still works on it")
    with pytest.raises(openai.BadRequestError, match="goes on from one that is"):
        ask(client, "More", previous_response_id=endless.id)
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(ask(client, "Hello!").id)


def test_stored_only_when_wanted_and_forgotten_when_asked(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        client.responses.retrieve(ask(client, "Hello!", store=False).id)
    kept = ask(client, "Hello!")
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "Hello!", previous_response_id=kept.id)
    assert caught.value.param == "previous_response_id"


def test_a_conversation_goes_on_after_a_call_that_was_cut_short(client: openai.OpenAI) -> None:
    first = ask(client, QUESTION, tools=[WEATHER], max_output_tokens=21)
    [call] = first.output
    assert (first.status, call.type) == ("incomplete", "function_call")
    assert not call.arguments.endswith("}")
    told: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    second = ask(client, told, previous_response_id=first.id, tools=[WEATHER])
    assert second.status == "completed"


def test_a_wrong_item_is_named_by_its_place_in_this_request(client: openai.OpenAI) -> None:
    kept = ask(client, "Hello!", instructions="Be kind.")
    for wrong in ({"role": "robot", "content": "a"}, {"role": "tool", "content": "a"}, {"type": "hologram"}):
        items: Any = [{"role": "user", "content": "a"}, wrong]
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]") as caught:
            ask(client, items, previous_response_id=kept.id, instructions="Be brief.")
        assert caught.value.param == "input"


def test_an_answer_that_is_cut_short_is_incomplete(client: openai.OpenAI) -> None:
    response = ask(client, "What is the capital of France?", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    events = list(ask(client, "What is the capital of France?", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_reasoning_can_be_kept_by_the_client(client: openai.OpenAI) -> None:
    response = ask(client, THINK, store=False, include=["reasoning.encrypted_content"])
    reasoning = response.output[0]
    assert reasoning.encrypted_content
    again: Any = [{"role": "user", "content": THINK}]
    opaque = {"type": "reasoning", "id": reasoning.id, "summary": [], "encrypted_content": reasoning.encrypted_content}
    full = [*again, reasoning.model_dump(), response.output[1].model_dump()]
    sealed = [*again, opaque, response.output[1].model_dump()]
    count = [ask(client, items, max_output_tokens=16, store=False).usage.input_tokens for items in (full, sealed)]
    assert count[0] == count[1] > ask(client, again, max_output_tokens=16, store=False).usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out_of_tokens_too(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    told = ask(client, THINK, **options)
    assert told.output[1].content[0].logprobs
    answer = ask(client, THINK, **options, stream=stream, extra_body={"include_reasoning": False})
    if stream:
        events = list(answer)
        assert not any(getattr(event, "logprobs", None) for event in events)
        answer = events[-1].response
    [message] = answer.output
    assert (message.content[0].text, message.content[0].logprobs) == (told.output[1].content[0].text, [])
    assert answer.usage == told.usage
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_logprobs_come_when_included(client: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 16}
    [part] = ask(client, "Hello!", **options).output[0].content
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode().startswith(part.text)


def test_truncation_leaves_out_the_oldest_turns(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be kind."}]
    for _ in range(160):
        turns += [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "Yes."}]
    turns += [{"role": "user", "content": "My name is Anna."}, {"role": "assistant", "content": "Hello, Anna!"}]
    turns += [{"role": "user", "content": "What is my name?"}]
    with pytest.raises(openai.BadRequestError, match="limited to 8192") as caught:
        ask(client, turns)
    assert caught.value.param == "input"
    response = ask(client, turns, truncation="auto", max_output_tokens=64)
    assert response.truncation == "auto"
    assert 7900 < response.usage.input_tokens <= 8192 - 64


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, "input"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"summary": "rhymed"}}, "reasoning.summary"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_request_names_its_field(client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/responses", body={"input": "Hello", **options, "stream": stream}, cast_to=object)
    assert caught.value.param == param
    assert caught.value.status_code == (404 if param == "previous_response_id" else 400)

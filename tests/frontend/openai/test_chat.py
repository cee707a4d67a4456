"""The real OpenAI client against a real server: chat."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import quire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """A chat request for eight greedy tokens, unless `options` say otherwise."""
    extra = {"ignore_eos": True, **options.pop("extra", {})}
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0, "extra_body": extra, **options}
    )


def events(base_url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[str]:
    """The data of every server-sent event, checked for framing."""
    with httpx.stream("POST", base_url + path, json={"model": "tiny", "stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]


def test_answer_has_openai_shape(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert re.fullmatch(rf"quire-{re.escape(quire.__version__)}-[0-9a-f]{{8}}", answer.system_fingerprint)
    assert "tool_calls" not in answer.to_dict()["choices"][0]["message"]


def test_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=400)
    chunks = list(ask(client, max_tokens=400, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_events_in_order(base_url: str) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "ignore_eos": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(base_url, body)
    assert done == "[DONE]"
    first, *_, last, usage = map(json.loads, chunks)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["stop_reason"] is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert first["usage"] is None
    assert {chunk["object"] for chunk in map(json.loads, chunks)} == {"chat.completion.chunk"}


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"})])
def test_the_end_of_a_stream_has_the_fingerprint(base_url: str, path: str, asked: Any, usage: bool) -> None:
    """It is that of a whole answer, and stands in the last event alone."""
    body = {**asked, "max_tokens": 4, "ignore_eos": True}
    whole = httpx.post(base_url + path, json=body).json()["system_fingerprint"]
    options = {"stream_options": {"include_usage": True}} if usage else {}
    *chunks, _ = events(base_url, {**body, **options}, path)
    *before, last = (json.loads(chunk).get("system_fingerprint") for chunk in chunks)
    assert last == whole
    assert set(before) <= {None}  # none before it, where all tokens came together


def test_continuous_usage_counts_up(base_url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(base_url, {"messages": HELLO, "max_tokens": 6, "ignore_eos": True, "stream_options": options})
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts[-1] == 6
    assert counts == sorted(counts)


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": ["a", "b c"]})]
)
def test_continuous_usage_is_each_choices_own(base_url: str, path: str, asked: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"n": 2, "max_tokens": 6, "ignore_eos": True, "stream_options": options, **asked}
    *chunks, end = map(json.loads, events(base_url, body, path)[:-1])
    last = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    assert len(last) == 2 * len(asked.get("prompt", "1"))
    assert [usage["completion_tokens"] for usage in last.values()] == [6] * len(last)
    assert end["usage"]["completion_tokens"] == 6 * len(last)
    assert end["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in last.values()) / 2


def test_n_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 10}
    whole = ask(client, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 30
    streamed = ["", "", ""]
    for chunk in ask(client, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_logprobs(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(whole) == 8
    for entry in whole:
        assert len(entry.top_logprobs) == 3
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert entry.logprob == best[0]  # greedy
        assert bytes(entry.bytes) == bytes(entry.top_logprobs[0].bytes)
    streamed: list[Any] = []
    for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


def test_logprobs_alone_show_the_sampled_token_only(client: openai.OpenAI) -> None:
    assert [entry.top_logprobs for entry in ask(client, logprobs=True).choices[0].logprobs.content] == [[]] * 8


def test_token_bytes_spell_the_text(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, max_tokens=30).choices[0]
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert spelled.decode("utf-8", "replace") == choice.message.content


def test_stop_string_and_its_reason(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=40).choices[0].message.content
    stop = text[3:5]
    choice = ask(client, max_tokens=40, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]
    assert choice.stop_reason == stop
    kept = ask(client, max_tokens=40, stop=stop, extra={"include_stop_str_in_output": True}).choices[0]
    assert kept.message.content == text[: text.index(stop) + len(stop)]


def test_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    assert ask(client, max_tokens=8, max_completion_tokens=3).usage.completion_tokens == 3


def test_content_parts_and_null_fields(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    plain, split = ask(client), ask(client, messages=parts, top_p=None, stop=None, logit_bias=None, tools=None)
    assert plain.choices[0].message.content == split.choices[0].message.content


def test_token_ids_on_request(client: openai.OpenAI, base_url: str) -> None:
    answer = ask(client, extra={"return_token_ids": True})
    assert len(answer.choices[0].token_ids) == 8
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    *chunks, _ = events(
        base_url,
        {"messages": HELLO, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
    )
    decoded = [json.loads(chunk) for chunk in chunks]
    assert decoded[0]["prompt_token_ids"] == answer.prompt_token_ids
    streamed = [i for chunk in decoded for i in chunk["choices"][0].get("token_ids", [])]
    assert streamed == answer.choices[0].token_ids


def test_continue_final_message(client: openai.OpenAI) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "I am"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(client, messages=messages, extra=extra)
    assert answer.choices[0].message.role == "assistant"
    shorter = ask(client, messages=messages).usage.prompt_tokens
    assert answer.usage.prompt_tokens < shorter


@pytest.mark.parametrize("content", ["I am", [{"type": "text", "text": "I"}, {"type": "text", "text": "am"}]], ids=str)
def test_echo_prepends_the_message_that_the_answer_goes_on_with(client: openai.OpenAI, content: Any) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": content}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    plain = ask(client, messages=messages, n=2, extra=going_on)
    echo = ask(client, messages=messages, n=2, extra={**going_on, "echo": True})
    before = content if isinstance(content, str) else "I\nam"
    expected = [before + choice.message.content for choice in plain.choices]
    assert [choice.message.content for choice in echo.choices] == expected
    assert echo.choices[0].message.content != plain.choices[0].message.content
    texts = ["", ""]
    for chunk in ask(client, messages=messages, n=2, stream=True, extra={**going_on, "echo": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_echo_adds_nothing_to_an_answer_in_another_role(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    assert ask(client, extra={"echo": True}).choices[0].message.content == plain
    open_turn = [*HELLO, {"role": "assistant", "content": "I am"}]  # the answer opens a turn of its own
    again = ask(client, messages=open_turn, extra={"echo": True}).choices[0].message.content
    assert again == "I am" + ask(client, messages=open_turn).choices[0].message.content


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2, extra={"echo": True})
    scored = ask(client, extra={"prompt_logprobs": 2})
    assert answer.prompt_logprobs == scored.prompt_logprobs
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


def test_model_may_be_any_served_name_or_left_out(client: openai.OpenAI, base_url: str) -> None:
    assert ask(client, model="tiny-alias").model == "tiny"
    body = {"messages": HELLO, "max_tokens": 1}
    assert httpx.post(base_url + "/v1/chat/completions", json=body).json()["model"] == "tiny"


def test_answer_id_comes_from_the_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "abc"}
    )
    assert raw.headers["x-request-id"] == "abc"
    assert raw.parse().id == "chatcmpl-abc"


@pytest.mark.parametrize("header", [{}, {"X-Request-Id": ""}])
def test_without_the_header_the_bodys_id_counts_or_else_there_is_one(base_url: str, header: dict[str, str]) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    url = f"{base_url}/v1/chat/completions"
    assert httpx.post(url, json={**body, "request_id": "mine"}, headers=header).json()["id"] == "chatcmpl-mine"
    answer = httpx.post(url, json=body, headers=header)
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    theirs = httpx.post(url, json=body, headers={**header, "X-Quire-Fresh-Request-Id": "forged"}).json()["id"]
    assert theirs != "chatcmpl-forged"


def test_a_priority_is_taken_where_requests_run_first_come(base_url: str) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "priority": -3}
    assert httpx.post(f"{base_url}/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"logit_bias": {"a": 5}}, "logit_bias"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra": {"stream_options": {"include_usage": True}}}, "stream_options"),
        ({"extra": {"guided_json": {"$ref": "#/nowhere"}}}, "guided_json"),
        ({"extra": {"chat_template_kwargs": {"messages": 1}}}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_request_names_its_field(client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool) -> None:
    if stream and "stream_options" in options.get("extra", {}):
        pytest.skip("is right with a stream")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream, **options)
    assert caught.value.param == param
    assert caught.value.body["type"] == "BadRequestError"  # type: ignore[index]


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        ask(client, model="gpt-4")


def test_harmless_fields_change_nothing(client: openai.OpenAI) -> None:
    plain = ask(client)
    extras = {"prompt_cache_key": "k", "safety_identifier": "s"}
    billed = ask(client, user="me", metadata={"a": "b"}, store=True, service_tier="auto", extra=extras)
    assert plain.choices[0].message.content == billed.choices[0].message.content


def test_unsupported_fields_at_their_defaults_pass(client: openai.OpenAI) -> None:
    assert ask(
        client,
        response_format={"type": "text"},
        parallel_tool_calls=True,
        tool_choice="none",
        extra={
            "use_beam_search": False,
            "length_penalty": 1.0,
            "best_of": 1,
            "bad_words": [],
            "include_reasoning": True,
        },
    )


def test_64_streams_at_once(base_url: str) -> None:
    async def stream(client: openai.AsyncOpenAI, seed: int) -> tuple[str, str]:
        text, reason = "", ""
        chunks = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"number {seed % 8}"}],
            max_tokens=30,
            seed=seed % 8,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async def main() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, seed) for seed in range(64)))

    answers = asyncio.run(main())
    assert {reason for _, reason in answers} == {"length"}
    assert [text for text, _ in answers] == [text for text, _ in answers[:8]] * 8  # the seed decides, not the company
    assert len({text for text, _ in answers}) == 8


def test_a_prediction_changes_no_token_and_is_counted(client: openai.OpenAI) -> None:
    plain = ask(client, max_tokens=24)
    text = plain.choices[0].message.content
    told = ask(client, max_tokens=24, prediction={"type": "content", "content": text})
    assert told.choices[0].message.content == text
    details = told.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    stream = ask(
        client,
        max_tokens=24,
        prediction={"type": "content", "content": parts},
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    assert chunks[-1].usage.completion_tokens_details == details
    other = ask(client, max_tokens=24, prediction={"type": "content", "content": "!" * 40}, n=2)
    assert {choice.message.content for choice in other.choices} == {text}
    wrong = other.usage.completion_tokens_details
    assert wrong.accepted_prediction_tokens <= 2
    assert wrong.rejected_prediction_tokens > 2
    assert plain.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    "prediction", ["text", {"type": "text", "content": "a"}, {"type": "content", "content": [{"type": "text"}]}]
)
def test_a_malformed_prediction_is_refused(client: openai.OpenAI, prediction: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra={"prediction": prediction})
    assert refused.value.param == "prediction"

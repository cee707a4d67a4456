"""Events that are assembled around a text equal the encoding of the whole event, byte for byte."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.answer_events import Turn
from quire.frontend.chat.config import ChatConfig
from quire.frontend.chat.conversation import Conversations
from quire.frontend.http.event_stream import Accepted
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import ChatChunk, ChatChunkChoice, ChatDelta, CompletionChunk
from quire.frontend.openai.answers import CompletionChunkChoice as TextChoice
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.chat_events import ChatChunks
from quire.frontend.openai.completion_events import CompletionChunks
from quire.frontend.openai.generation import Reply, TextEvent, event
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.outputs import CompletionOutput, RequestOutput

ENCODER = msgspec.json.Encoder()
TEXTS = ["a", 'quote " back\\slash', "\x00\x1f\n\t\x7f", "é€𝄞\N{REPLACEMENT CHARACTER}", "</script>\u2028", '"text":""']
HOSTILE_ID = 'cmpl-"text":"","content":"",\\"text\\":""\u00e9'


def make_turn() -> Turn:
    """A turn whose texts are the answer unchanged. Nothing uses its stream and tokenizer."""
    return Turn(cast(Any, None), 2, None, cast(Any, None))


def make_reply(**options: bool) -> Reply:
    usage = {"cache_details": False, "include_usage": False, "continuous_usage": False, **options}
    return Reply(id=HOSTILE_ID, model='m"', created=1, **usage)


def output(text: str, index: int = 0) -> RequestOutput:
    part = CompletionOutput(index=index, text=text, token_ids=[1])
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1, 2], outputs=[part], finished=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("include_usage", [False, True])
def test_text_events_equal_whole_encodings(text: str, include_usage: bool) -> None:
    reply = make_reply(include_usage=include_usage)
    request = CompletionRequest(prompt="x", n=2)
    chunks = CompletionChunks(request, reply, LogprobFormatter(None, 0, as_ids=False), ENCODER, None)
    for index in (1, 0, 1):
        chunk = CompletionChunk(
            id=reply.id,
            created=1,
            model=reply.model,
            choices=[TextChoice(index=index, text=text)],
            usage=None if include_usage else msgspec.UNSET,
        )
        assert chunks.add(0, output(text, index)) == event(chunk, ENCODER)


@pytest.mark.parametrize("text", TEXTS)
def test_chat_events_equal_whole_encodings(text: str) -> None:
    reply = make_reply()
    formatter = LogprobFormatter(None, 0, as_ids=False)
    chunks = ChatChunks(ChatRequest(messages=[]), reply, "assistant", formatter, ENCODER, make_turn())
    chunks.add(output("first"))  # behind the event that tells the role
    choice = ChatChunkChoice(index=0, delta=ChatDelta(content=text))
    chunk = ChatChunk(id=reply.id, created=1, model=reply.model, choices=[choice])
    assert chunks.add(output(text)) == event(chunk, ENCODER)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_the_role_of_each_choice_opens_a_stream_before_there_is_an_output(options: dict[str, bool]) -> None:
    """As vLLM's first chunks: the role, and empty content. It is told once."""
    formatter = LogprobFormatter(None, 0, as_ids=False)
    request = ChatRequest(messages=[], n=2, stream=True)
    chunks = ChatChunks(request, make_reply(**options), "assistant", formatter, ENCODER, make_turn())
    opening = [msgspec.json.decode(each.removeprefix(b"data: ")) for each in chunks.open().split(b"\n\n")[:-1]]
    told = [(choice["index"], choice["delta"]) for each in opening for choice in each["choices"]]
    assert told == [(index, {"role": "assistant", "content": ""}) for index in range(2)]
    assert all(each.get("usage", 0) == (None if options else 0) for each in opening)
    assert b"role" not in chunks.add(output("a", 1))


@pytest.mark.parametrize(
    ("options", "fields"),
    [({"include_usage": True, "continuous_usage": True}, {}), ({}, {"return_token_ids": True})],
)
def test_a_role_that_comes_with_the_prompts_tokens_waits_for_them(
    options: dict[str, bool], fields: dict[str, bool]
) -> None:
    formatter = LogprobFormatter(None, 0, as_ids=False)
    request = ChatRequest(messages=[], stream=True, **fields)
    chunks = ChatChunks(request, make_reply(**options), "assistant", formatter, ENCODER, make_turn())
    assert chunks.open() == b""
    first = msgspec.json.decode(chunks.add(output("a")).split(b"\n\n")[0].removeprefix(b"data: "))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    if options:
        assert first["usage"]["prompt_tokens"] == 2
    else:
        assert first["prompt_token_ids"] == [1, 2]


def test_a_chats_first_frame_is_the_role_once_the_request_is_accepted(checkpoint: Callable[..., Path]) -> None:
    async def stream() -> list[bytes]:
        engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), num_gpu_blocks_override=64, device="cpu")
        service = ChatCompletions(engine, ServerConfig(), Conversations(engine, ChatConfig()))
        request = ChatRequest(messages=[{"role": "user", "content": "a"}], stream=True, max_tokens=2)
        try:
            await engine.start()
            return [frame async for frame in service.stream(request)]
        finally:
            await engine.aclose()

    first, *others = asyncio.run(stream())
    assert isinstance(first, Accepted)
    assert b'"delta":{"role":"assistant","content":""}' in first
    assert others
    assert b"role" not in b"".join(others)


def test_events_that_carry_more_than_text_are_not_shortened() -> None:
    request = CompletionRequest(prompt="x", return_token_ids=True)
    formatter = LogprobFormatter(None, 0, as_ids=False)
    chunks = CompletionChunks(request, make_reply(), formatter, ENCODER, None)
    for expected in ({"token_ids": [1], "prompt_token_ids": [1, 2]}, {"token_ids": [1]}):
        choice = msgspec.json.decode(chunks.add(0, output("a")).removeprefix(b"data: "))["choices"][0]
        assert {key: value for key, value in choice.items() if key.endswith("ids")} == expected
    usage = make_reply(include_usage=True, continuous_usage=True)
    counted = CompletionChunks(CompletionRequest(prompt="x"), usage, formatter, ENCODER, None)
    totals = [msgspec.json.decode(counted.add(0, output("a")).removeprefix(b"data: "))["usage"] for _ in range(2)]
    assert [total["completion_tokens"] for total in totals] == [1, 2]


def test_text_event_finds_its_place_behind_a_hostile_id() -> None:
    sample = event(
        CompletionChunk(id=HOSTILE_ID, created=1, model="m", choices=[TextChoice(index=0, text="")]), ENCODER
    )
    filled = TextEvent(sample, "text", ENCODER).fill("new")
    assert msgspec.json.decode(filled.removeprefix(b"data: "))["choices"][0]["text"] == "new"
    assert msgspec.json.decode(filled.removeprefix(b"data: "))["id"] == HOSTILE_ID

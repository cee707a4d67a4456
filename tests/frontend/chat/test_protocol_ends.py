"""How answers end in each of the three protocols: finish reasons, a failure in the middle, the limit of calls."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.errors import EngineError
from quire.frontend.anthropic.answers import MessageAnswer, MessageUsage
from quire.frontend.anthropic.builder import MessageBuilder
from quire.frontend.openai.answers import ChatMessage, TokenLogprob
from quire.frontend.openai.chat_events import read_message
from quire.frontend.openai.responses.answers import Response
from quire.frontend.openai.responses.streaming_events import ResponseBuilder
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.parsing.events import (
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from tests.servers import ServerProcess

PLUGIN = """
from quire.frontend.openai.responses.tools import OfferedTools
from quire.frontend.parsing.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from quire.frontend.parsing.plugins import ReasoningParser, ToolParser

class Calls(ToolParser):
    name = "calls"

    def push(self, text):
        if self.tools[0].name == "boom":
            raise ValueError("a secret of the server's")
        return [ToolCallStart(0, "", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]

class Halves(ReasoningParser):
    name = "halves"
    markers = ("<|im_start|>",)

    def __init__(self, prompt_text):
        self.kind = TextDelta

    def push(self, text):
        events = []
        for index, piece in enumerate(text.split("<|im_start|>")):
            if index:
                self.kind = TextDelta if self.kind is ReasoningDelta else ReasoningDelta
            events.append(self.kind(piece))
        return events
"""
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
USER: list[Any] = [{"role": "user", "content": "Hello"}]
FAILS = {"vllm_xargs": {"breaks_at": 150}}
ENGINE_SAID = "BreaksLater failed."

# --------------------------------------------------------------------------------------------------------- the reasons

STOPPED = Finish("stop", "END")
ENDS: list[tuple[Finish, tuple[str, str | None, str], tuple[str, str | None] | None]] = [
    (Finish("stop"), ("completed", None, "completed"), ("end_turn", None)),
    (Finish("stop", 7), ("completed", None, "completed"), ("end_turn", None)),
    (STOPPED, ("completed", None, "completed"), ("stop_sequence", "END")),
    (Finish("length"), ("incomplete", "max_output_tokens", "incomplete"), ("max_tokens", None)),
    (Finish("length", "grammar_dead_end"), ("incomplete", "max_output_tokens", "incomplete"), ("max_tokens", None)),
    (
        Finish("repetition", "repetition_detected"),
        ("incomplete", "max_output_tokens", "incomplete"),
        ("max_tokens", None),
    ),
    (Finish("tool_calls"), ("completed", None, "completed"), ("tool_use", None)),
    (Finish("abort"), ("failed", None, "incomplete"), None),
    (Finish("error"), ("failed", None, "incomplete"), None),
]
"""A finish, then a response's status, why it is incomplete and its last item's status, then a message's stop reason and
sequence; None where a message is an error."""


def decode(frames: list[bytes]) -> list[dict[str, Any]]:
    """Events of frames; each one's name is its type."""
    events = []
    for frame in b"".join(frames).decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = frame.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize(("finish", "response_ends", "message_ends"), ENDS, ids=str)
def test_every_reason_has_its_word(finish: Finish, response_ends: Any, message_ends: Any) -> None:
    events: list[Event] = [TextDelta("Hi"), finish]
    message, told = read_message("assistant", events)
    assert (message.content, told) == ("Hi", finish)

    response = Response(id="r", created_at=0, model="m")
    responses = ResponseBuilder(response, OfferedTools(None), None)
    frames = [*responses.start(), *responses.add(events), responses.end()]
    details = response.incomplete_details
    assert (response.status, details and details.reason, response.output[-1].status) == response_ends
    assert bool(response.error) is (response.status == "failed")
    assert decode(frames)[-1]["type"] == f"response.{response.status}"

    answer = MessageAnswer(id="m", model="m", usage=MessageUsage(input_tokens=1, output_tokens=1))
    messages = MessageBuilder(answer)
    if message_ends is None:
        with pytest.raises(EngineError, match="ended by the server"):
            messages.add(events)
        return
    last = decode([*messages.add(events), *messages.end()])
    assert (answer.stop_reason, answer.stop_sequence) == message_ends
    assert last[-2]["delta"] == {"stop_reason": message_ends[0], "stop_sequence": message_ends[1]}


def test_a_failed_response_closes_what_was_open_and_counts_on() -> None:
    response = Response(id="r", created_at=0, model="m")
    builder = ResponseBuilder(response, OfferedTools(None), None)
    frames = builder.start()
    frames += builder.add([ReasoningDelta("Hm."), ToolCallStart(0, "1", "f"), ToolCallArguments(0, '{"a"')])
    frames += builder.fail("server_error", "down")
    events = decode(frames)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-4:]] == [
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.failed",
    ]
    final = events[-1]["response"]
    assert final["error"] == {"code": "server_error", "message": "down"}
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]


def test_log_probabilities_of_text_that_the_parser_holds_back_come_with_it() -> None:
    """A space may be the last before a call. Tokens that become no text of a message are not told."""
    response = Response(id="r", created_at=0, model="m")
    builder = ResponseBuilder(response, OfferedTools(None), None)
    frames = builder.start()
    outputs: list[tuple[str, list[Event]]] = [
        *(("Hm.", [ReasoningDelta("Hm.")]), ("</think>", []), ("A", [TextDelta("A")]), (" ", [])),
        *(("B", [TextDelta(" B")]), ("<call>", []), ("f", [ToolCallStart(0, "1", "f")]), ("}", [ToolCallEnd(0)])),
    ]
    for token, events in outputs:
        frames += builder.add(events, [TokenLogprob(token, -1.0, list(token.encode()), [])])
    deltas = [event for event in decode(frames) if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in delta["logprobs"]] for delta in deltas] == [["A"], [" ", "B"]]


def test_a_message_with_calls_and_nothing_else_has_no_content() -> None:
    events: list[Event] = [ToolCallStart(0, "1", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0), Finish("tool_calls")]
    message, _ = read_message("assistant", events)
    assert isinstance(message, ChatMessage)
    assert message.content is None


# ------------------------------------------------------------------------------------------------------------ a server


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with parsers and logits processors of our own."""
    folder = tmp_path_factory.mktemp("ends")
    plugin = folder / "parsers.py"
    plugin.write_text(PLUGIN)
    process = ServerProcess(
        folder, str(checkpoint("llama")), "--served-model-name", "tiny", "--num-gpu-blocks-override", "256",
        "--enable-auto-tool-choice", "--tool-call-parser", "calls", "--tool-parser-plugin", str(plugin),
        "--reasoning-parser", "halves", "--reasoning-parser-plugin", str(plugin),
        "--logits-processors", "tests.executor.processors:Forced", "tests.executor.processors:BreaksLater",
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


class Asker:
    """Sends bodies to a server."""

    def __init__(self, base_url: str) -> None:
        self._client = httpx.Client(base_url=base_url, timeout=60)

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(path, json={"model": "tiny", "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._client.post(path, json={"model": "tiny", "temperature": 0, **body})

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def wait(self, response_id: str) -> Any:
        """A response that is made in the background, once it is no longer made."""
        for _ in range(400):
            response = self.get(f"/v1/responses/{response_id}").json()
            if response["status"] not in ("queued", "in_progress"):
                return response
            time.sleep(0.02)
        raise AssertionError("the response is still made")

    def stream(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """The frames of a stream, which ended as HTTP wants it."""
        body = {"model": "tiny", "temperature": 0, "stream": True, **body}
        with self._client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            return [b"".join(answer.iter_bytes())]

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def ask(server: ServerProcess) -> Iterator[Asker]:
    asker = Asker(server.base_url)
    yield asker
    asker.close()


class TestFailure:
    """The engine ends a request with an error after a few tokens."""

    def test_chat(self, ask: Asker) -> None:
        body = {"messages": USER, "max_tokens": 300, "ignore_eos": True, **FAILS}
        [text] = ask.stream("/v1/chat/completions", body)
        *chunks, error, done = [line.removeprefix("data: ") for line in text.decode().strip().split("\n\n")]
        assert done == "[DONE]"
        assert ENGINE_SAID in json.loads(error)["error"]["message"]
        assert "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert ask.refused("/v1/chat/completions", body).status_code == 400

    def test_response_stream(self, ask: Asker) -> None:
        events = decode(ask.stream("/v1/responses", {"input": "Hello", "ignore_eos": True, **FAILS}))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[-4:]] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.failed",
        ]
        told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        final = events[-1]["response"]
        [item] = final["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", told)
        assert told
        assert ENGINE_SAID in final["error"]["message"]
        assert ask.get(f"/v1/responses/{final['id']}").json() == final
        follows = ask.refused("/v1/responses", {"input": "And?", "previous_response_id": final["id"]})
        assert follows.status_code == 400
        assert "is failed" in follows.json()["error"]["message"]

    def test_response_in_the_background(self, ask: Asker) -> None:
        body = {"input": "Hello", "ignore_eos": True, "background": True, **FAILS}
        response = ask.wait(ask("/v1/responses", body)["id"])
        assert response["status"] == "failed"
        assert response["error"]["code"] == "invalid_prompt"
        events = decode(ask.stream("/v1/responses", body))
        again = decode([ask.get(f"/v1/responses/{events[0]['response']['id']}?stream=true&starting_after=2").content])
        assert events[-1]["type"] == "response.failed"
        assert again == events[3:]

    def test_a_parser_that_raises_fails_its_own_response(self, ask: Asker) -> None:
        body = {"input": "Hello", "tools": [{"type": "function", "name": "boom"}], "ignore_eos": True}
        body["max_output_tokens"] = 100
        response = ask.wait(ask("/v1/responses", {**body, "background": True})["id"])
        assert response["status"] == "failed"
        assert response["error"]["code"] == "server_error"
        assert "secret" not in response["error"]["message"]
        streamed = ask.refused("/v1/responses", {**body, "stream": True})
        assert streamed.status_code == 500 or decode([streamed.content])[-1]["type"] == "response.failed"
        assert "secret" not in streamed.text
        bounded = ask.refused("/v1/responses", {**body, "max_tool_calls": 1})  # read as it arrives
        assert bounded.status_code == 500
        assert "secret" not in bounded.text

    def test_whole_response_has_the_errors_own_status(self, ask: Asker) -> None:
        for more in ({}, {"max_tool_calls": 2, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"}):
            answer = ask.refused("/v1/responses", {"input": "Hello", "ignore_eos": True, **FAILS, **more})
            assert answer.status_code == 400
            assert ENGINE_SAID in answer.json()["error"]["message"]

    def test_message(self, ask: Asker) -> None:
        body = {"messages": USER, "max_tokens": 300, "vllm_xargs": {"breaks_at": 50}}  # before it would end by itself
        events = decode(ask.stream("/v1/messages", body))
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-2:] == ["content_block_delta", "error"]
        assert events[-1]["error"]["type"] == "invalid_request_error"
        assert ENGINE_SAID in events[-1]["error"]["message"]
        answer = ask.refused("/v1/messages", body)
        assert (answer.status_code, answer.json()["type"]) == (400, "error")

    def test_the_server_goes_on(self, ask: Asker) -> None:
        ask.stream("/v1/responses", {"input": "Hello", **FAILS})
        assert ask("/v1/responses", {"input": "Hello", "max_output_tokens": 5})["status"] == "incomplete"


def test_a_repetition_has_its_own_word_in_chats(ask: Asker) -> None:
    body = {"messages": USER, "max_tokens": 50, "allowed_token_ids": [70], "ignore_eos": True}
    body["repetition_detection"] = {"max_pattern_size": 1, "min_count": 6}
    [choice] = ask("/v1/chat/completions", body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    [text] = ask.stream("/v1/chat/completions", body)
    last = json.loads(text.decode().strip().split("\n\n")[-2].removeprefix("data: "))["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")


class TestCalls:
    """Every piece of the model's text is a call here, so that an answer has no end of them."""

    def test_a_chat_ends_with_its_one_call(self, ask: Asker) -> None:
        body = {
            "messages": USER,
            "tools": [{"type": "function", "function": FUNCTION}],
            "max_tokens": 300,
            "ignore_eos": True,
        }
        free = ask("/v1/chat/completions", body)
        assert free["usage"]["completion_tokens"] == 300
        assert free["choices"][0]["message"]["tool_calls"][0]["id"].startswith("chatcmpl-tool-")
        more = {"parallel_tool_calls": False, "return_token_ids": True, "logprobs": True}
        whole = ask("/v1/chat/completions", {**body, **more, "n": 2})
        assert whole["usage"]["completion_tokens"] < 20
        for choice in whole["choices"]:
            assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
            assert len(choice["message"]["tool_calls"]) == 1
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
        [text] = ask.stream("/v1/chat/completions", {**body, **more})
        *lines, done = text.decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["choices"][0]["token_ids"]
        assert [call["index"] for chunk in chunks for call in chunk["delta"].get("tool_calls", [])] == [0, 0]
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]

    def test_a_response_ends_with_its_last_call(self, ask: Asker) -> None:
        tools = [{"type": "function", **FUNCTION}]
        body = {"input": "Hello", "tools": tools, "max_output_tokens": 300, "ignore_eos": True}
        for fields, count in (({"max_tool_calls": 3}, 3), ({"parallel_tool_calls": False}, 1)):
            whole = ask("/v1/responses", {**body, **fields})
            streamed = decode(ask.stream("/v1/responses", {**body, **fields}))[-1]["response"]
            for response in (whole, streamed):
                assert response["status"] == "completed"
                assert len(response["output"]) == count
            assert whole["usage"] == streamed["usage"]  # however busy the server is
            assert whole["usage"]["output_tokens"] < 20
        [call] = streamed["output"]
        assert (call["call_id"].partition("_")[0], call["id"].partition("_")[0]) == ("call", "fc")

    def test_a_message_ends_with_its_one_call(self, ask: Asker) -> None:
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        body = {"messages": USER, "tools": tools, "max_tokens": 300}
        assert ask("/v1/messages", body)["usage"]["output_tokens"] > 60
        body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        message = ask("/v1/messages", body)
        assert message["stop_reason"] == "tool_use"
        assert message["usage"]["output_tokens"] < 20
        [block] = message["content"]
        assert (block["id"].partition("_")[0], block["input"]) == ("toolu", {})
        assert decode(ask.stream("/v1/messages", body))[-2]["delta"]["stop_reason"] == "tool_use"

    def test_calls_go_by_any_id(self, ask: Asker) -> None:
        """A conversation may have begun at another server."""
        call = {"id": "whatever it was", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        assert ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        items = [{"type": "function_call", "call_id": "toolu_1", "name": "f", "arguments": "{}"}]
        items.append({"type": "function_call_output", "call_id": "toolu_1", "output": "ok"})
        assert ask("/v1/responses", {"input": [*USER, *items], "max_output_tokens": 1})
        use = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "ok"}
        turns = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        assert ask("/v1/messages", {"messages": turns, "max_tokens": 1})


class TestSpecialTokens:
    """Tokens 0 and 1 are <|endoftext|> and <|im_start|>, of which the second is a mark of the reasoning parser."""

    def ask_forced(self, ask: Asker, token_id: int, **fields: Any) -> dict[str, Any]:
        body = {"messages": USER, "max_tokens": 8, "ignore_eos": True, "vllm_xargs": {"forced_token_id": token_id}}
        return ask("/v1/chat/completions", {**body, **fields})["choices"][0]["message"]

    def test_those_that_mark_nothing_are_no_text(self, ask: Asker) -> None:
        message = self.ask_forced(ask, 0)
        assert message["content"]
        assert "<|endoftext|>" not in message["content"]
        shown = self.ask_forced(ask, 0, skip_special_tokens=False)
        assert shown["content"].count("<|endoftext|>") == 4

    def test_those_that_mark_something_reach_the_parser(self, ask: Asker) -> None:
        message = self.ask_forced(ask, 1)
        assert message["content"]
        assert message["reasoning"]
        assert "im_start" not in message["content"] + message["reasoning"]


def test_a_stream_that_the_server_ends_says_so_with_the_next_number(server: ServerProcess) -> None:
    """The last test here, as it ends the server."""
    body = {"model": "tiny", "input": "Hello", "ignore_eos": True, "stream": True}
    text = b""
    with httpx.stream("POST", server.base_url + "/v1/responses", json=body, timeout=60) as answer:
        for chunk in answer.iter_bytes():
            if not text:
                server.process.terminate()
            text += chunk
    *events, last = decode([text])
    assert last["type"] == "error"
    assert (last["code"], last["sequence_number"]) == ("503", len(events))
    assert "shutting down" in last["message"]

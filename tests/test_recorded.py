"""Requests that real clients sent, recorded and with long texts cut: each is answered as its client needs it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import httpx
import openai.types.chat
import openai.types.responses
import pytest
from openai.pagination import SyncPage
from pydantic import TypeAdapter

from tests.servers import ServerProcess

RECORDED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "recorded").glob("*.json")}
IGNORED = {
    "codex": "client_metadata, tools[2].web_search",
    "anthropic_sdk": "tools[1].web_search_20250305",
}
"""What the answer's header lists, by client; nothing for the others."""

LIMITS: dict[str, dict[str, Any]] = {
    "claude_code": {"max_tokens": 40},
    "codex": {"max_output_tokens": 40},
    "opencode": {"max_tokens": 40},
}
"""What is added to a body, because the demo model may not find an end by itself."""

READERS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    "/v1/completions": (dict[str, Any], None),  # OpenAI's type has no null for the first token of an echo
    "/v1/responses": (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    "/v1/messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    "/v1/messages/count_tokens": (anthropic.types.MessageTokensCount, None),
    "/v1/models": (SyncPage[openai.types.Model], None),
}
"""The types of the makers' own clients, by path: of a whole answer, and of an event of a stream."""

PROGRAMS = Path(__file__).parent.parent / "scripts/clients"
AGENTS = {"claude_code": "Bash", "codex": "exec_command", "opencode": "bash"}
"""Coding agents, whose records are whole tasks, and the tool that each runs commands with."""

LAST_EVENTS = {"response.completed", "response.incomplete", "message_stop", "[DONE]"}


@pytest.mark.parametrize("client", RECORDED)
def test_a_recorded_conversation_is_answered(demo_server: ServerProcess, client: str) -> None:
    for request in RECORDED[client]["requests"]:
        body = {**request["body"], **LIMITS.get(client, {}), "model": "quire-demo"} if "body" in request else None
        answer = httpx.request(
            request["method"], demo_server.base_url + request["path"], headers=request["headers"], json=body, timeout=60
        )
        assert answer.status_code == request.get("status", 200), answer.text
        assert answer.headers.get("x-quire-ignored-fields") == IGNORED.get(client)
        if answer.status_code == 200:
            whole, event = READERS[request["path"].split("?")[0]]
            streamed = bool(body and body.get("stream"))
            kind = "text/event-stream" if streamed else "application/json"
            assert answer.headers["content-type"].split(";")[0] == kind
            if streamed:
                read_stream(answer.text, TypeAdapter(event))
            else:
                TypeAdapter(whole).validate_json(answer.content)


def read_stream(text: str, event: TypeAdapter[Any]) -> None:
    """Reads each event but pings, which the clients drop unread, and requires the protocol's own last one."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    lines = [line for line in lines if line != '{"type":"ping"}']
    for line in lines:
        if line != "[DONE]":
            event.validate_json(line)
    assert lines[-1] in LAST_EVENTS or json.loads(lines[-1])["type"] in LAST_EVENTS


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As scripts/test-clients starts it for coding agents, where a logits processor plays the model's part. The records
    hold less text than the agents sent, so that the context is long enough."""
    process = ServerProcess(
        *(tmp_path_factory.mktemp("agents"), "--logits-processors", "agent_part:AgentPart"),
        env={"PYTHONPATH": f"{PROGRAMS}{os.pathsep}{Path.cwd()}"},
    )
    yield process.wait_until_ready()
    process.stop()


@pytest.mark.parametrize("client", AGENTS)
def test_an_agent_goes_from_call_to_call_to_its_answer(agents_server: ServerProcess, client: str) -> None:
    """Each request of the record holds the call that answered the one before, and what the client's tool said."""
    requests = [request for request in RECORDED[client]["requests"] if request["body"].get("tools")]
    told = []
    for request in requests:
        body = {**request["body"], "model": "quire-demo"}
        url = agents_server.base_url + request["path"]
        answer = httpx.post(url, headers=request["headers"], json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        told.append(told_in(request["path"].split("?")[0], answer.text))
    read, write, (_, _, end) = told
    word = end.removeprefix("The code word is ").removesuffix(".")
    assert word.startswith("word")
    for (tool, arguments, text), command in ((read, "cat task.txt"), (write, f"echo {word} > answer.txt")):
        assert (tool, text) == (AGENTS[client], "")
        assert command in json.loads(arguments).values()
    assert f"code word: {word}" in json.dumps(requests[1]["body"])
    assert f"echo {word} > answer.txt" in json.dumps(requests[2]["body"])


def told_in(path: str, stream: str) -> tuple[str, str, str]:
    """(tool, arguments, text) of a stream, put together from its deltas as the protocol's clients do."""
    tool = arguments = text = ""
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        each = json.loads(line.removeprefix("data: "))
        match path, each.get("type"):
            case "/v1/messages", "content_block_start":
                tool += each["content_block"].get("name", "")
            case "/v1/messages", "content_block_delta":
                arguments += each["delta"].get("partial_json", "")
                text += each["delta"].get("text", "")
            case "/v1/responses", "response.output_item.added":
                tool += each["item"].get("name", "")
            case "/v1/responses", "response.function_call_arguments.delta":
                arguments += each["delta"]
            case "/v1/responses", "response.output_text.delta":
                text += each["delta"]
            case "/v1/chat/completions", _:
                for choice in each["choices"]:
                    text += choice["delta"].get("content") or ""
                    for call in choice["delta"].get("tool_calls") or ():
                        tool += call["function"].get("name") or ""
                        arguments += call["function"].get("arguments") or ""
    return tool, arguments, text

"""Requests that real clients sent, recorded and with long texts cut: each is answered as its client needs it."""

import json
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

LIMITS: dict[str, dict[str, Any]] = {"codex": {"max_output_tokens": 40}, "opencode": {"max_tokens": 40}}
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

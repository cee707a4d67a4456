"""Requests that real clients sent, recorded and with long texts cut: each is answered as its client needs it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import ServerProcess

RECORDED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "recorded").glob("*.json")}
IGNORED = {
    "codex": "client_metadata, tools[2].web_search",
    "claude_code": None,
    "anthropic_sdk": "tools[1].web_search_20250305",
}
"""What the answer's header lists, by client."""

LIMITS: dict[str, dict[str, Any]] = {"codex": {"max_output_tokens": 40}}
"""What is added to a body, because the demo model may not find an end by itself."""

LAST_EVENTS = {"response.completed", "response.incomplete", "message_stop"}


@pytest.mark.parametrize("client", RECORDED)
def test_a_recorded_conversation_is_answered(demo_server: ServerProcess, client: str) -> None:
    for request in RECORDED[client]["requests"]:
        body = {**request["body"], **LIMITS.get(client, {}), "model": "quire-demo"}
        answer = httpx.request(
            request["method"], demo_server.base_url + request["path"], headers=request["headers"], json=body, timeout=60
        )
        assert answer.status_code == request.get("status", 200), answer.text
        assert answer.headers.get("x-quire-ignored-fields") == IGNORED[client]
        if body.get("stream"):
            events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
            assert events[-1] in LAST_EVENTS

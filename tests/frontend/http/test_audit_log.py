"""The audit log and logs in JSON: whose request it was, what it took, and no prompt."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.errors import ConfigError
from quire.frontend.http.audit_log import AuditLog
from quire.frontend.requests.usage import CallUsage
from tests.servers import ServerProcess
from tests.test_resilience import wait_for

SECRET = "Hello secret"
KEY = {"Authorization": "Bearer second"}
BODY = {"model": "tiny", "prompt": SECRET, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("audited")
    process = ServerProcess(
        folder, str(checkpoint("llama")), "--served-model-name", "tiny", "--num-gpu-blocks-override", "128",
        "--audit-log-path", str(folder / "audit.jsonl"), "--log-format", "json", "--enable-log-requests",
        "--api-key", "first", "--api-key", "second",
    )  # fmt: skip
    process.audit = folder / "audit.jsonl"  # type: ignore[attr-defined]
    yield process.wait_until_ready()
    process.stop()


def audited(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The line of a request; it is written after the answer."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [line for line in lines(server) if line["request_id"] == request_id]
        return bool(found)

    wait_for(is_there)
    [line] = found
    return line


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    path: Path = server.audit  # type: ignore[attr-defined]
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(server: ServerProcess, request_id: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.base_url}/v1/completions", json=BODY | body, headers={**KEY, "X-Request-Id": request_id}
    )


def test_a_line_has_the_tokens_of_all_requests_of_the_call(server: ServerProcess) -> None:
    answer = ask(server, "two-prompts", prompt=[SECRET, "you"], n=2).json()
    line = audited(server, "two-prompts")
    assert (line["method"], line["path"], line["route"], line["status"]) == (
        *("POST", "/v1/completions", "/v1/completions"),
        200,
    )
    assert line["is_whole"]
    assert line["num_requests"] == 2
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (answer["usage"]["prompt_tokens"], 12)
    assert line["finish_reasons"] == ["length"]
    assert line["key"] == "key-2"
    assert line["client"].startswith("127.0.0.1:")
    assert 0 < line["seconds"] < 60
    assert line["time"].endswith("+00:00")


def test_a_client_that_leaves_is_seen(server: ServerProcess) -> None:
    headers = {**KEY, "X-Request-Id": "gone"}
    body = BODY | {"stream": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    line = audited(server, "gone")
    assert not line["is_whole"]
    assert 0 < line["num_output_tokens"] < 2000
    assert line["finish_reasons"] == ["abort"]


def test_a_refused_request_and_a_forged_id(server: ServerProcess) -> None:
    forged = 'x"}{"status": 200'
    assert ask(server, forged, max_tokens=-1).status_code == 400
    line = audited(server, forged)
    assert (line["status"], line["num_requests"]) == (400, 0)


def test_no_line_has_a_prompt(server: ServerProcess) -> None:
    ask(server, "quiet")
    audited(server, "quiet")
    path: Path = server.audit  # type: ignore[attr-defined]
    assert "secret" not in path.read_text()


def test_lines_of_the_log_name_the_request(server: ServerProcess) -> None:
    ask(server, "logged")
    wait_for(lambda: "logged" in server.logs())
    records = [json.loads(line) for line in server.logs().splitlines()]
    mine = [record["message"] for record in records if record.get("request_id") == "logged"]
    assert any(message.startswith("Received request cmpl-logged") for message in mine)
    assert any('"POST /v1/completions HTTP/1.1" 200' in message for message in mine)
    assert all("request_id" not in record for record in records if record["processName"] == "engine")


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="--audit-log-path: cannot write"):
        AuditLog(str(tmp_path / "no" / "audit"))
    full = AuditLog("/dev/full")
    facts: dict[str, Any] = {"request_id": "r", "method": "GET", "status": 200, "is_whole": True, "seconds": 0.1,
                             "request_bytes": 0, "response_bytes": 0, "usage": CallUsage()}  # fmt: skip
    for _ in range(2):
        full.add({"path": "/x"}, **facts)  # type: ignore[typeddict-item]
    assert caplog.text.count("the audit log /dev/full cannot be written, and loses lines: No space left") == 1

"""`quire chat` and `quire complete` against a small server that speaks OpenAI's event streams."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.frontend.cli.main import QUIRE
from quire.frontend.cli.terminal import UNSAFE


class EchoHandler(BaseHTTPRequestHandler):
    """Repeats the last message word by word; `error` is refused, `break` broken off, `forever` never ends."""

    server: "EchoServer"

    def do_GET(self) -> None:
        self._send_json(200, {"object": "list", "data": [{"id": "echo-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if text == "error":
            self._send_json(400, {"error": {"message": "max_tokens must be at least 1.", "param": "max_tokens"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(text)
        except (BrokenPipeError, ConnectionResetError):
            self.server.disconnected.set()

    def _stream(self, text: str) -> None:
        self.wfile.write(b": ping\n\n")
        for word in text.split(" "):
            self._event(f"{word} ")
        while text == "forever":
            self._event("on ")
            time.sleep(0.02)
        if text == "break":
            self._write({"error": {"message": "the engine died"}})
            return
        self._write({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, text: str) -> None:
        choice = {"delta": {"content": text}} if self.path.endswith("/chat/completions") else {"text": text}
        self._write({"choices": [{"index": 0, **choice}]})

    def _write(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Logs nothing."""


class EchoServer(ThreadingHTTPServer):
    """Keeps the requests that it saw."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.disconnected = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoServer]:
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = EchoServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def quire(*words: str) -> int:
    return QUIRE.run("quire", list(words))


def test_quick_chat_prints_the_answer_and_leaves(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", echo.url, "-q", "hello there", "--system-prompt", "Be kind.") == 0
    assert capsys.readouterr() == ("hello there \n", "")
    path, headers, body = echo.requests[0]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body["model"] == "echo-model"
    assert body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello there"},
    ]


def test_quick_completion(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["complete", "--url", echo.url, "--model-name", "mine", "--max-tokens", "5", "--quick", "once upon"]
    assert quire(*words, "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "once upon \n"
    assert "[3 prompt + 2 output tokens, first after" in captured.err
    path, _, body = echo.requests[0]
    assert (path, body["model"], body["prompt"], body["max_tokens"]) == ("/v1/completions", "mine", "once upon", 5)


def test_key_of_the_flag_beats_the_environment(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "environment")
    quire("chat", "--url", echo.url, "-q", "a")
    quire("chat", "--url", echo.url, "-q", "a", "--api-key", "flag")
    assert [headers["Authorization"] for _, headers, _ in echo.requests] == ["Bearer environment", "Bearer flag"]


def test_a_bare_address_is_completed(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", f"127.0.0.1:{echo.server_port}", "-q", "hi") == 0
    assert capsys.readouterr().out == "hi \n"


def test_without_a_server_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi") == 1
    line = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9/v1. Start one with `quire serve`" in line
    assert line.count("\n") == 1


def test_errors_of_the_server_are_shown(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", echo.url, "-q", "error") == 1
    assert capsys.readouterr() == ("", "quire chat: max_tokens must be at least 1.\n")
    assert quire("complete", "--url", echo.url, "-q", "break") == 1
    assert capsys.readouterr() == ("break \n", "quire complete: the engine died\n")


def test_a_number_that_is_none_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quire("complete", "-q", "hello", "--max-tokens", "many")
    assert capsys.readouterr().err == "quire complete: --max-tokens: needs a whole number (got 'many')\n"


def test_conversation_keeps_what_was_said(
    echo: EchoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\nerror\ntwo\n"))
    assert quire("chat", "--url", echo.url) == 0
    captured = capsys.readouterr()
    assert captured.out == "one \ntwo \n"
    assert captured.err == "quire chat: max_tokens must be at least 1.\n"
    assert [message["content"] for message in echo.requests[-1][2]["messages"]] == ["one", "one ", "two"]


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(echo: EchoServer) -> None:
    def take_terminal() -> None:
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the controlling one
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, and inherited so, where a shell runs the suite with &

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "chat", "--url", echo.url],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(theirs)
    seen = ""

    def read_until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 4096).decode()
        seen = seen.split(text, 1)[1]

    try:
        read_until("> ")
        os.write(ours, b"forever\n")
        read_until("on on ")
        os.write(ours, b"\x03")
        read_until("(stopped)")
        assert echo.disconnected.wait(5)
        read_until("> ")
        os.write(ours, b"again\n")
        read_until("again \r\n")
        read_until("> ")
        os.write(ours, b"\x04")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    roles = [message["role"] for message in echo.requests[-1][2]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_terminal_escapes_do_not_pass() -> None:
    assert "a\x1b]0;title\x07b\x9b2Jc\nd\te\r".translate(UNSAFE) == "a]0;titleb2Jc\nd\te"

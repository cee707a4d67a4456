"""A small server that speaks OpenAI's event streams and does on request what a real one does rarely."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class EchoHandler(BaseHTTPRequestHandler):
    """Repeats the last message word by word; `error` is refused, `break` broken off, `forever` never ends.

    `think` is thought about first, and `long` cut off.
    """

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
        if text == "think":
            self._choice({"delta": {"reasoning": "let me "}})
            self._choice({"delta": {"reasoning": "see"}})
            self._choice({"delta": {"content": "\n\n"}})
        for word in text.split(" "):
            self._event(f"{word} ")
        while text == "forever":
            self._event("on ")
            time.sleep(0.02)
        if text == "long":
            self._choice({"delta": {}, "finish_reason": "length"})
        if text == "break":
            self._write({"error": {"message": "the engine died"}})
            return
        self._write({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, text: str) -> None:
        self._choice({"delta": {"content": text}} if self.path.endswith("/chat/completions") else {"text": text})

    def _choice(self, choice: dict[str, Any]) -> None:
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

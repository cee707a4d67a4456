"""`quire bench serve` against a server that is not Quire: it has no `/v1/models`, and keeps connections open."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.commands import quire


class Embedder(BaseHTTPRequestHandler):
    """Answers texts with their number of tokens, and keeps the clients' addresses."""

    protocol_version = "HTTP/1.1"
    clients: set[tuple[str, int]]

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.clients.add(self.client_address)
        self._answer(200, b'{"usage": {"prompt_tokens": 7}}')

    def log_message(self, *_: object) -> None: ...

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def other_server() -> Iterator[ThreadingHTTPServer]:
    Embedder.clients = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Embedder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_server_without_a_list_of_models_is_measured(
    other_server: ThreadingHTTPServer, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    load = (
        "bench", "serve", "--base-url", f"http://127.0.0.1:{other_server.server_port}", "--backend",
        "openai-embeddings", "--model", "theirs", "--num-prompts", "20", "--input-len", "4", "--max-concurrency", "3",
        "--output-json", str(out), "--disable-tqdm",
    )  # fmt: skip
    done = quire(*load, "--tokenizer", str(checkpoint("llama")))
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert (figures["completed"], figures["total_input_tokens"]) == (20, 140)
    assert 1 <= len(Embedder.clients) <= 3, "connections are kept, one for each request in flight"

    done = quire(*load)
    assert done.returncode != 0
    assert "/v1/models answered 404" in done.stderr

"""Bytes on a connection: each has answers of HTTP, or its end, and never that of an unexpected error."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.examples import fuzzed, mutated
from tests.servers import WITHOUT_MODEL, ServerProcess

BODY = b'{"prompt": "Hello", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
REQUESTS = [
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nX: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"HEAD /v1/models?a=%ff HTTP/1.0\r\n\r\n",
]
SILENT_SECONDS = 0.03
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("bytes"), str(checkpoint("llama")), program=WITHOUT_MODEL)
    yield process.wait_until_ready()
    assert process.stop() == 0
    assert "Traceback" not in process.logs()


def answered(server: ServerProcess, sent: bytes) -> bytes:
    """All that comes back, until the server closes the connection; the client closes its half when all is silent."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SILENT_SECONDS) as raw:
        try:
            raw.sendall(sent)
            while True:
                try:
                    part = raw.recv(1 << 16)
                except TimeoutError:
                    raw.settimeout(30)
                    raw.shutdown(socket.SHUT_WR)
                    continue
                if not part:
                    return found
                found += part
        except (ConnectionResetError, BrokenPipeError):
            return found  # closed before it had read everything


def test_bytes(server: ServerProcess) -> None:
    requests = st.lists(st.one_of(st.sampled_from(REQUESTS), st.sampled_from(REQUESTS).flatmap(mutated)), max_size=3)

    @fuzzed(80)
    @given(st.one_of(st.binary(max_size=80), requests.map(b"".join)))
    def run(sent: bytes) -> None:
        found = answered(server, sent)
        assert not found or STATUS.match(found), (sent, found)
        assert b"500" not in STATUS.findall(found), (sent, found)

    run()
    assert httpx.get(f"{server.base_url}/health", timeout=60).status_code == 200

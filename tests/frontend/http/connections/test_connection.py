"""Malformed input on a connection: half of a request, an upgrade, an endless head."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.frontend.http.server_config import ServerConfig
from tests.servers import WITHOUT_MODEL, ServerProcess

BODY = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MESSAGE = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TIMEOUT_SECONDS = 1
MAX_HEAD_BYTES = ServerConfig().h11_max_incomplete_event_size


@pytest.fixture(scope="module")
def impatient(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that wants a whole request within a second."""
    process = ServerProcess(
        tmp_path_factory.mktemp("impatient"),
        *(str(checkpoint("llama")), "--served-model-name", "tiny", "--api-key", "key"),
        *("--h11-max-header-count", "20", "--h11-max-incomplete-event-size", "2K"),
        env={"QUIRE_HTTP_TIMEOUT_REQUEST": str(TIMEOUT_SECONDS), "QUIRE_HTTP_TIMEOUT_KEEP_ALIVE": "60"},
        program=WITHOUT_MODEL,
    )
    yield process.wait_until_ready()
    assert "Traceback" not in process.logs()
    process.stop()


@contextlib.contextmanager
def connected(server: ServerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        yield raw


def answer(raw: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the next answer on the connection."""
    with raw.makefile("rb", buffering=0) as lines:  # unbuffered: the next answer stays where it is
        status = lines.readline()
        assert status, "closed without an answer"
        headers = dict(line.decode().lower().strip().split(": ", 1) for line in iter(lines.readline, b"\r\n"))
        body = b""
        while len(body) < int(headers["content-length"]):
            body += lines.read(int(headers["content-length"]) - len(body))
    return int(status.split()[1]), headers, json.loads(body)


def is_closed(raw: socket.socket) -> bool:
    try:
        return raw.recv(65536) == b""
    except ConnectionResetError:
        return True


# ------------------------------------------------------------------------------------------------------------- upgrade


@pytest.mark.parametrize(
    "upgrade",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n",
        b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\nSec-WebSocket-Version: 13\r\n",
    ],
    ids=["h2c, as Java asks", "websocket"],
)
@pytest.mark.parametrize("num_pieces", [1, 2, 500])
def test_upgrade_is_ignored_and_the_body_is_read(server: ServerProcess, upgrade: bytes, num_pieces: int) -> None:
    request = POST + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    size = -(-len(request) // num_pieces)
    with connected(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):  # the connection serves on
            for start in range(0, len(request), size):
                raw.sendall(request[start : start + size])
            status, _, body = answer(raw)
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == 1


# The headers of java.net.http.HttpClient, which asks for HTTP/2 with every request in the clear.
JAVA = (
    b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n%bHost: localhost\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/21.0.2\r\nContent-Type: application/json\r\n\r\n"
)


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: %d\r\n" % len(BODY), BODY),
        (b"Transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    ],
    ids=["whole", "chunked"],
)
def test_javas_client_is_answered(server: ServerProcess, framing: bytes, body: bytes) -> None:
    with connected(server) as raw:
        for _ in range(2):
            raw.sendall(JAVA % framing + body)
            status, headers, answered = answer(raw)
            assert status == 200, answered
            assert "upgrade" not in headers
            assert answered["usage"]["completion_tokens"] == 1


def test_upgrade_with_a_chunked_body_and_close(server: ServerProcess) -> None:
    head = POST + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(server) as raw:
        raw.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert answer(raw)[0] == 200
        assert is_closed(raw)


def test_get_with_an_upgrade_is_answered(server: ServerProcess) -> None:
    with connected(server) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert answer(raw)[2]["data"][0]["id"] == "tiny"


# ----------------------------------------------------------------------------------------------------------- no request


@pytest.mark.parametrize(
    "sent",
    [
        *(b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"),
        *(b"CONNECT example.com:80 HTTP/1.1\r\nHost: example.com\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: ServerProcess, sent: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(sent)
        status, headers, body = answer(raw)
        assert status == 400
        assert headers["connection"] == "close"
        assert body["error"]["message"] == "This is not a valid HTTP/1.1 request."
        assert is_closed(raw)


def test_endless_head_is_refused(server: ServerProcess) -> None:
    with connected(server) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(b"GET /version HTTP/1.1\r\n")
        time.sleep(0.05)
        for _ in range(40):
            raw.sendall(b"x-" + b"a" * MAX_HEAD_BYTES)
            time.sleep(0.001)
        pytest.fail("it was read")
    with connected(server) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\n")
        for _ in range(5):
            time.sleep(0.02)
            raw.sendall(b"x-a: %b\r\n" % (b"b" * (MAX_HEAD_BYTES // 4)))
        status, _, body = answer(raw)
        assert status == 431
        assert str(MAX_HEAD_BYTES) in body["error"]["message"]


LONG_HEADS = {
    "one header": b"x-a: %b\r\n" % (b"b" * MAX_HEAD_BYTES),
    "many headers": b"x-a: 0123456789\r\n" * (MAX_HEAD_BYTES // 10),
    "beside an upgrade": b"Connection: Upgrade\r\nUpgrade: h2c\r\nx-a: %b\r\n" % (b"b" * MAX_HEAD_BYTES),
}


@pytest.mark.parametrize("headers", LONG_HEADS.values(), ids=LONG_HEADS)
@pytest.mark.parametrize("num_pieces", [1, 30])
def test_long_head_is_refused_however_it_comes(server: ServerProcess, headers: bytes, num_pieces: int) -> None:
    request = POST + headers + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    size = -(-len(request) // num_pieces)
    with connected(server) as raw:
        with contextlib.suppress(ConnectionError):  # refused before its end
            for start in range(0, len(request), size):
                raw.sendall(request[start : start + size])
                time.sleep(0.002)
        assert answer(raw)[0] == 431
        assert is_closed(raw)


def test_long_address_is_refused(server: ServerProcess) -> None:
    with connected(server) as raw:
        raw.sendall(b"GET /version?%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a" * MAX_HEAD_BYTES))
        assert answer(raw)[0] == 431


def test_head_within_the_limit_is_read(server: ServerProcess) -> None:
    with connected(server) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\nx-a: %b\r\n\r\n" % (b"b" * (MAX_HEAD_BYTES - 100)))
        assert answer(raw)[0] == 200


@pytest.mark.parametrize(
    ("headers", "said"), [(b"x-a: b\r\n" * 20, "more than 20 headers"), (b"x-a: %b\r\n" % (b"b" * 2048), "2048 bytes")]
)
def test_limits_of_heads_are_options(impatient: ServerProcess, headers: bytes, said: str) -> None:
    with connected(impatient) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")
        status, _, body = answer(raw)
        assert status == 431
        assert said in body["error"]["message"]
    with connected(impatient) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n" + headers[: len(headers) // 2].rstrip() + b"\r\n\r\n")
        assert answer(raw)[0] == 200


def test_trailers_are_no_headers(impatient: ServerProcess) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    with connected(impatient) as raw:
        raw.sendall(head + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer key\r\n\r\n" % (len(BODY), BODY))
        assert answer(raw)[0] == 401


def test_long_body_and_the_next_head_in_one_piece_are_no_long_head(server: ServerProcess) -> None:
    body = json.dumps({"tokens": [5] * 50_000}).encode()
    request = (
        b"POST /detokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (
            len(body),
            body,
        )
    )
    with connected(server) as raw:
        for piece in (request[:10], request[10:] + request[:10], request[10:]):
            raw.sendall(piece)
            time.sleep(0.05)
        for _ in range(2):
            assert answer(raw)[0] == 200


# ------------------------------------------------------------------------------------------------------ half a request

HALVES = {
    "nothing": (b"", 408),
    "half a head": (POST + b"Content-", 408),
    "half a body": (POST + b"Authorization: Bearer key\r\nContent-Length: 1000\r\n\r\n{", 408),
    "no end of chunks": (POST + b"Authorization: Bearer key\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
    "half a body that nobody reads": (POST + b"Content-Length: 1000\r\n\r\n{", 401),
    "half a message": (MESSAGE + b"x-api-key: key\r\nContent-Length: 1000\r\n\r\n{", 408),
}
"""What is sent on connections that wait beside each other, and the status of the answer."""


def test_half_a_request_is_given_up(impatient: ServerProcess) -> None:
    with contextlib.ExitStack() as connections:
        halves = {half: connections.enter_context(connected(impatient)) for half in HALVES}
        for half, raw in halves.items():
            raw.sendall(HALVES[half][0])
        for half, raw in halves.items():
            status, headers, body = answer(raw)
            expected = HALVES[half][1]
            assert status == expected, half
            if half == "half a message":
                assert (headers["connection"], body["type"]) == ("close", "error")
                assert "did not arrive" in body["error"]["message"]
            else:
                assert body["error"]["code"] == expected
                assert (f"within {TIMEOUT_SECONDS} seconds" in body["error"]["message"]) == (expected == 408)
                assert is_closed(raw)


def test_dripping_does_not_help(impatient: ServerProcess) -> None:
    def drip(raw: socket.socket) -> None:
        raw.sendall(POST + b"Authorization: Bearer key\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(200):
            raw.sendall(b"{")
            time.sleep(0.05)

    with connected(impatient) as raw, pytest.raises(ConnectionError):
        drip(raw)


def test_a_slow_sender_reads_an_early_answer(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The connection is not idle while the body comes, however short the time is for which idle ones are kept."""
    limits = ("--max-request-body-bytes", "100")
    environment = {"QUIRE_HTTP_TIMEOUT_KEEP_ALIVE": "1"}
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), *limits, env=environment, program=WITHOUT_MODEL
    ).wait_until_ready()
    with connected(server) as closing, connected(server) as kept:
        for raw, connection in ((closing, b"close"), (kept, b"keep-alive")):
            raw.sendall(POST + b"Connection: %b\r\nContent-Length: 3000000\r\n\r\n" % connection)
        for _ in range(15):
            for raw in (closing, kept):
                raw.sendall(b" " * 200_000)
            time.sleep(0.1)
        for raw, connection in ((closing, "close"), (kept, None)):
            status, headers, _ = answer(raw)
            assert (status, headers.get("connection")) == (413, connection)
            assert is_closed(raw)
    server.stop()


def test_long_answers_and_idle_connections_are_not_hurried(impatient: ServerProcess) -> None:
    with httpx.Client(base_url=impatient.base_url, headers={"Authorization": "Bearer key"}, timeout=60) as client:
        body = {"prompt": "on", "max_tokens": 1500, "ignore_eos": True, "n": 8}
        before = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
            lines = []
            for line in streamed.iter_lines():
                lines.append(line)
                if len(lines) < 30:
                    time.sleep(TIMEOUT_SECONDS / 15)  # a slow reader
        assert lines[-2] == "data: [DONE]"
        assert time.monotonic() - before > TIMEOUT_SECONDS
        time.sleep(TIMEOUT_SECONDS * 1.5)
        assert client.get("/v1/models").status_code == 200


# ----------------------------------------------------------------------------------------------- versions and hosts


@pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n"], ids=["none", "two"])
def test_a_request_of_http_1_1_names_one_host(server: ServerProcess, hosts: bytes) -> None:
    """RFC 9112, section 3.2."""
    with connected(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")
        status, _, body = answer(raw)
        assert (status, is_closed(raw)) == (400, True)
        assert "Host" in body["error"]["message"]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions"])
def test_http_1_0_gets_no_chunks(server: ServerProcess, path: bytes) -> None:
    """RFC 9112, section 6.1: a server sends no Transfer-Encoding but in answer to HTTP/1.1."""
    body = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": true}'
    with connected(server) as raw:
        raw.sendall(
            b"POST %b HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (path, len(body), body)
        )
        head, _, events = b"".join(iter(lambda: raw.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert [part.partition(b"data: ")[0] for part in events.split(b"\n\n")] == [b""] * (events.count(b"\n\n") + 1)
    assert events.endswith(b"data: [DONE]\n\n")


def test_http_1_0_gets_whole_answers_with_their_length(server: ServerProcess) -> None:
    with connected(server) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        status, headers, body = answer(raw)
    assert (status, body["object"]) == (200, "list")
    assert "transfer-encoding" not in headers


# ------------------------------------------------------------------------------------------------------------- refusals


def sent_until_closed(raw: socket.socket, most: int) -> int:
    """Sends up to `most` bytes; returns how many, once the other end has closed the connection."""
    piece, num_sent = b" " * 2**20, 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while num_sent < most:
            num_sent += raw.send(piece)
    return num_sent


@pytest.mark.parametrize("why", ["413", "401"])
def test_a_refused_body_is_not_read_to_its_end(server: ServerProcess, impatient: ServerProcess, why: str) -> None:
    """The answer comes at once, and the connection ends long before the gigabyte that was announced."""
    refusing, status = (server, 413) if why == "413" else (impatient, 401)
    with connected(refusing) as raw:
        raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % 2**30)
        assert answer(raw)[0] == status
        assert sent_until_closed(raw, 2**30) < 2**27


def test_one_connection_too_many_is_told_so(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    process = ServerProcess(tmp_path, str(checkpoint("llama")), "--max-connections", "4", program=WITHOUT_MODEL)
    with contextlib.ExitStack() as stack:
        process.wait_until_ready()
        time.sleep(0.2)  # those that asked for readiness are closed
        held = [stack.enter_context(connected(process)) for _ in range(4)]
        for raw in held:
            raw.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [answer(raw)[0] for raw in held] == [200] * 4
        with connected(process) as raw:
            status, headers, body = answer(raw)
            assert (status, is_closed(raw), headers["retry-after"]) == (503, True, "1")
            assert "4 connections" in body["error"]["message"]
        held[0].sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(held[0])[0] == 200
    process.stop()


@pytest.mark.parametrize("rest", [b"\x00\x01", POST + b"Content-Length: 2\r\n\r\n{}", b"GET /version HTTP/1.1\r\n\r\n"])
def test_an_answer_whose_connection_is_closed_is_no_error(impatient: ServerProcess, rest: bytes) -> None:
    """What comes behind its request closes the connection, or the client does. The fixture looks for stacks in the
    log."""
    key = b"Authorization: Bearer key\r\n"
    for _ in range(10):
        with connected(impatient) as raw:
            raw.sendall(POST + key + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + rest)
            raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(1 << 16):
                    pass

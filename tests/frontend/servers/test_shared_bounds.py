"""What bounds one API server bounds several together: limits of keys, connections, bodies, and the queue."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.servers import ServerProcess

KEYS = [
    {"name": "ann", "key": "one"},
    {"name": "few", "key": "few", "requests_per_minute": 6},
    {"name": "short", "key": "short", "tokens_per_minute": 40},
]
NUM_SERVERS = 3
MOST_CONNECTIONS = 24
MOST_BODY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "keys.json").write_text(json.dumps(KEYS))
    process = ServerProcess(
        folder, str(checkpoint("llama", max_position_embeddings=20_000)), "--served-model-name", "tiny",
        "--api-server-count", str(NUM_SERVERS), "--api-key-file", str(folder / "keys.json"),
        "--max-connections", str(MOST_CONNECTIONS), "--max-num-seqs", "1", "--max-num-queued-reqs", "2",
        "--max-request-body-bytes", str(MOST_BODY_BYTES), "--max-inflight-body-bytes", str(MOST_BODY_BYTES),
    ).wait_until_ready()  # fmt: skip
    yield process
    process.stop()


def ask(server: ServerProcess, key: str, path: str = "/v1/models", **body: object) -> httpx.Response:
    """The answer to a request on a connection of its own, which any of the servers may have accepted."""
    return httpx.request(
        "POST" if body else "GET",
        server.base_url + path,
        headers={"Authorization": f"Bearer {key}"},
        json=body or None,
        timeout=60,
    )


def pids(server: ServerProcess) -> set[int]:
    """The servers that live."""
    found = set()
    for each in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if "servers.api_server" in " ".join(each.cmdline()):
                found.add(each.pid)
    return found


def test_a_keys_requests_a_minute_are_those_of_all_servers(server: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(server, "few"), range(20)))
    assert sorted(each.status_code for each in answers) == [200] * 6 + [429] * 14
    refused = next(each for each in answers if each.status_code == 429)
    assert 1 <= int(refused.headers["Retry-After"]) <= 61
    assert ask(server, "one").status_code == 200


def test_a_keys_tokens_a_minute_are_those_of_all_servers(server: ServerProcess) -> None:
    """Outputs count, too, wherever they were made."""
    body = {"prompt": [5, 6, 7], "max_tokens": 30, "ignore_eos": True}
    statuses = []
    for _ in range(8):  # by several servers in turn
        statuses.append(ask(server, "short", "/v1/completions", **body).status_code)
        time.sleep(0.05)  # the count of an output follows its answer
    assert statuses == [200, 200] + [429] * 6


def test_the_queue_is_one_for_all_servers(server: ServerProcess) -> None:
    """One runs, two wait, and no server takes one more."""
    body = {"prompt": [5], "max_tokens": 15_000, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        for number in range(3):
            stack.enter_context(contextlib.closing(sent(server, json.dumps(body).encode())))
            wait_for(lambda: waiting_and_running(server) == number + 1)  # noqa: B023 (called at once)
        answers = [ask(server, "one", "/v1/completions", **body) for _ in range(6)]
        assert [each.status_code for each in answers] == [429] * 6
        assert "--max-num-queued-reqs is 2" in answers[0].json()["error"]["message"]
    wait_for(lambda: waiting_and_running(server) == 0)


def sent(server: ServerProcess, body: bytes, num_bytes: int | None = None) -> socket.socket:
    """A connection with a request of the key "one".

    Args:
        num_bytes: the length that its head tells, if not that of `body`.
    """
    raw = connect(server)
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer one\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (num_bytes or len(body)) + body
    )
    return raw


def waiting_and_running(server: ServerProcess) -> float:
    text = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def test_bodies_of_all_servers_have_one_budget(server: ServerProcess) -> None:
    """Bodies that have half arrived fill it. Small requests are served all the same."""
    half = b'{"prompt": "' + b"a" * 500_000
    large = {"prompt": "a" * 600_000}
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(contextlib.closing(sent(server, half, 1_000_000)))
        wait_for(lambda: ask(server, "one", "/v1/completions", **large).status_code == 429)
        answers = [ask(server, "one", "/v1/completions", **large) for _ in range(6)]
        assert [each.status_code for each in answers] == [429] * 6
        assert answers[0].headers["Retry-After"] == "1"
        assert "--max-inflight-body-bytes" in answers[0].json()["error"]["message"]
        assert ask(server, "one", "/v1/completions", prompt="a", max_tokens=1).status_code == 200
    wait_for(lambda: ask(server, "one", "/v1/completions", **large).status_code == 400)  # too long a prompt


def test_connections_are_counted_over_all_servers_and_forgotten_with_a_killed_one(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        wait_for(lambda: fill(server, stack) == MOST_CONNECTIONS)
        assert [refused(server) for _ in range(6)] == [True] * 6
        former = pids(server)
        for pid in former:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(pids(server) - former) == NUM_SERVERS)
        wait_for(lambda: not refused(server))


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def fill(server: ServerProcess, stack: contextlib.ExitStack) -> int:
    """Opens connections until one is refused; keeps and counts the others. Closes all if they are too few."""
    held = contextlib.ExitStack()
    for number in range(MOST_CONNECTIONS + 1):
        raw = connect(server)
        held.callback(raw.close)
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        if raw.recv(12) != b"HTTP/1.1 200":
            if number == MOST_CONNECTIONS:
                stack.enter_context(held)
            else:
                held.close()  # a connection of an earlier request was open yet
            return number
    raise AssertionError("nothing was refused")


def refused(server: ServerProcess) -> bool:
    """Whether a connection more is told that there are too many, or that nobody listens."""
    try:
        with contextlib.closing(connect(server)) as raw:
            raw.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            return raw.recv(12) != b"HTTP/1.1 200"
    except OSError:
        return True

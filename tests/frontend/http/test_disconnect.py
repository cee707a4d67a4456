"""When a client disconnects, its request's resources are freed at once, as the server's metrics show."""

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.servers import ServerProcess

LONG = {"model": "tiny", "prompt": "on and on", "max_tokens": 2000, "ignore_eos": True}
PATIENCE_SECONDS = 60.0
JSON = "Content-Type: application/json\r\n"


@pytest.fixture
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60) as client:
        yield client


def sample(client: httpx.Client, name: str, label: str = "") -> float:
    """One value at /metrics."""
    lines = client.get("/metrics").text.splitlines()
    [value] = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + "{") and label in line]
    return float(value)


def aborted(client: httpx.Client) -> float:
    return sample(client, "vllm:request_success_total", 'finished_reason="abort"')


def wait_until_idle(client: httpx.Client) -> None:
    """Waits until no request runs and no page is held."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sample(client, "vllm:num_requests_running") or sample(client, "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline, "the request still runs, or its pages are still held"
        time.sleep(0.02)


def test_stream_that_is_closed_ends_in_the_engine(client: httpx.Client) -> None:
    before, tokens = aborted(client), sample(client, "vllm:generation_tokens_total")
    with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        next(answer.iter_lines())
    wait_until_idle(client)
    assert aborted(client) == before + 1
    assert sample(client, "vllm:generation_tokens_total") - tokens < 1500


@pytest.mark.parametrize("n", [1, 3])
def test_client_that_hangs_up_before_the_answer_ends_in_the_engine(client: httpx.Client, n: int) -> None:
    before = aborted(client)
    body = json.dumps({**LONG, "n": n}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        raw.sendall(head + body)
        while not sample(client, "vllm:num_requests_running"):
            time.sleep(0.01)
        assert client.get("/load").json() == {"server_load": 1}
    wait_until_idle(client)
    assert aborted(client) == before + n
    assert client.get("/load").json() == {"server_load": 0}


def test_prompts_of_one_request_end_together(client: httpx.Client) -> None:
    before = aborted(client)
    body = {**LONG, "prompt": ["one", "two", "three"], "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until_idle(client)
    assert aborted(client) == before + 3


def test_half_a_request_disturbs_nobody(client: httpx.Client, server: ServerProcess) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
    assert "Traceback" not in server.logs()


def test_bad_requests_leave_the_server_serving(client: httpx.Client) -> None:
    bodies = [b"{", b'{"prompt": "\\ud800"}', b"\xff" * 100, b"[" * 10**6, b'{"prompt": NaN}', b"x" * 10 * 2**20]
    statuses = [
        client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}).status_code
        for body in bodies
    ]
    assert statuses == [400, 400, 400, 400, 400, 413]
    assert client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


def test_metrics_follow_a_request(client: httpx.Client) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count")
    before = [sample(client, name) for name in names]
    usage = client.post("/v1/completions", json={**LONG, "max_tokens": 5}).json()["usage"]
    after = [sample(client, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, usage["prompt_tokens"], 1]
    assert sample(client, "vllm:cache_config_info", 'block_size="16"') == 1

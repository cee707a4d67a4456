"""Several API servers on one port with two engines: any process is killed, and the others go on."""

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.frontend.servers.shared_routing import PUBLISH_SECONDS
from tests.servers import ServerProcess

pytestmark = pytest.mark.turns(4, among="whole systems")

BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "temperature": 0}

MAX_TOKENS = 60_000
"""Of answers that a test ends itself: they take a minute and more, so none ends by itself before that."""


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("servers"), str(checkpoint("llama", max_position_embeddings=MAX_TOKENS + 5000)),
        "--served-model-name", "tiny", "--data-parallel-size", "2", "--num-gpu-blocks-override", "5000",
        "--middleware", "tests.frontend.servers.tagging.Tagging",
        env={"QUIRE_ENGINE_HEARTBEAT_TIMEOUT_S": "600"},  # a stopped engine is silent
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


def children(server: ServerProcess, module: str) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [each for each in found if module in " ".join(each.cmdline())]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def counts(server: ServerProcess) -> tuple[float, float, float]:
    """(requests that ended by their length, HTTP requests, steps of all engines), as one of the servers tells them."""
    text = httpx.get(server.base_url + "/metrics", timeout=20).raise_for_status().text
    assert len(re.findall("^# TYPE vllm:generation_tokens_total ", text, re.MULTILINE)) == 1
    patterns = (
        r'^vllm:request_success_total{.*finished_reason="length".*} (\S+)$',
        r'^http_requests_total{.*handler="/v1/completions".*} (\S+)$',
        r"^vllm:iteration_tokens_total_count{.*} (\S+)$",
    )
    first, second, third = (sum(map(float, re.findall(pattern, text, re.MULTILINE))) for pattern in patterns)
    return first, second, third


def post(server: ServerProcess, **fields: object) -> str:
    answer = httpx.post(f"{server.base_url}/v1/completions", json=BODY | fields, timeout=60)
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


@contextlib.contextmanager
def standing(server: ServerProcess) -> Iterator[None]:
    """No request ends by itself here, however slow the machine is: the engines' processes are stopped meanwhile."""
    engines = children(server, "engine_main")
    for engine in engines:
        engine.suspend()
    try:
        yield
    finally:
        for engine in engines:
            engine.resume()


def owner(client: httpx.Client) -> int:
    """The pid of the server that accepted a client's connection."""
    [stream] = [each for each in client._transport._pool.connections if not each.is_closed()]  # type: ignore[attr-defined]
    port = stream._connection._network_stream.get_extra_info("client_addr")[1]
    [pid] = {each.pid for each in psutil.net_connections("tcp") if each.raddr and each.raddr.port == port and each.pid}
    return pid


@contextlib.contextmanager
def clients_of_two(server: ServerProcess) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two clients with a connection each, which different servers have accepted."""
    with (
        httpx.Client(base_url=server.base_url, timeout=60) as one,
        httpx.Client(base_url=server.base_url, timeout=60) as other,
    ):
        one.get("/version")

        def by_another() -> bool:
            other._transport.close()
            other.get("/version")
            return owner(other) != owner(one)

        wait_for(by_another)
        yield one, other


def test_one_port_several_processes_and_counts_that_are_summed(server: ServerProcess) -> None:
    """As many servers as engines, which is the default."""
    assert len(children(server, "servers.api_server")) == 2
    assert len(children(server, "engine_main")) == 2
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: post(server), range(16)))
    assert len(set(texts)) == 1
    assert httpx.get(f"{server.base_url}/version").headers["x-tag"] == "yes"  # the user's own module
    wait_for(lambda: counts(server)[:2] == (16, 16))
    seen = [counts(server) for _ in range(6)]
    assert {each[:2] for each in seen} == {(16, 16)}
    assert len({each[2] for each in seen}) == 1  # steps of the engines are counted once, whichever server is asked


def test_a_killed_server_takes_its_own_requests_alone(server: ServerProcess) -> None:
    """Its requests are aborted in the engines, those of the others go on, and no counter goes back."""
    before = counts(server)
    with clients_of_two(server) as (one, other):
        victim = owner(one)
        endless = BODY | {"max_tokens": MAX_TOKENS, "stream": True}
        with one.stream("POST", "/v1/completions", json=endless) as first:
            lines = first.iter_lines()
            next(lines)
            with other.stream("POST", "/v1/completions", json=endless | {"max_tokens": 1800}) as second:
                rest = second.iter_lines()
                next(rest)
                os.kill(victim, signal.SIGKILL)
                assert "data: [DONE]" in list(rest)
            with pytest.raises(httpx.HTTPError):
                list(lines)
    wait_for(lambda: len({each.pid for each in children(server, "servers.api_server")} - {victim}) == 2)
    after = counts(server)
    assert all(now >= then for now, then in zip(after, before, strict=True))
    assert after[0] >= before[0] + 1
    wait_for(lambda: "a frontend is gone: aborting its requests: 1" in server.logs())


RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2, "temperature": 0}
ENDLESS = RESPONSE | {"max_output_tokens": MAX_TOKENS, "ignore_eos": True, "background": True}


def respond(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = client.post("/v1/responses", json=RESPONSE | fields).raise_for_status().json()
    return body


def test_what_one_server_keeps_all_servers_know(server: ServerProcess) -> None:
    with clients_of_two(server) as (one, other):
        first = respond(one)
        assert other.get(f"/v1/responses/{first['id']}").json() == first
        second = respond(other, previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert len(one.get(f"/v1/responses/{second['id']}/input_items").json()["data"]) > 1
        assert one.delete(f"/v1/responses/{second['id']}").json()["deleted"]
        assert other.get(f"/v1/responses/{second['id']}").status_code == 404
        taken = one.post("/v1/responses", json=RESPONSE | {"request_id": first["id"]})
        assert "is taken" in taken.json()["error"]["message"]

        conversation = one.post("/v1/conversations", json={}).json()["id"]
        assert respond(other, conversation=conversation)["status"] in ("completed", "incomplete")
        item = {"items": [{"role": "user", "content": "And?"}]}
        assert one.post(f"/v1/conversations/{conversation}/items", json=item).status_code == 200
        roles = [each["role"] for each in other.get(f"/v1/conversations/{conversation}/items?order=asc").json()["data"]]
        assert roles == ["user", "assistant", "user"]


def test_what_one_server_makes_is_followed_and_ended_at_another(server: ServerProcess) -> None:
    with clients_of_two(server) as (one, other):
        with one.stream("POST", "/v1/responses", json=ENDLESS | {"stream": True}) as stream:
            made = json.loads(next(each for each in stream.iter_lines() if each.startswith("data: "))[6:])["response"]
        with other.stream("GET", f"/v1/responses/{made['id']}?stream=true&starting_after=1") as stream:
            lines = (each for each in stream.iter_lines() if each.startswith("data: "))
            numbers = [json.loads(next(lines)[6:])["sequence_number"] for _ in range(5)]
        assert numbers == [2, 3, 4, 5, 6]
        assert other.get(f"/v1/responses/{made['id']}").json()["status"] == "in_progress"
        assert other.delete(f"/v1/responses/{made['id']}").status_code == 200
    with clients_of_two(server) as (one, other):
        made = respond(one, **ENDLESS)
        assert other.post(f"/v1/responses/{made['id']}/cancel").json()["status"] == "cancelled"
        assert one.get(f"/v1/responses/{made['id']}").json()["status"] == "cancelled"
        deleted = respond(one, **ENDLESS)
        assert other.delete(f"/v1/responses/{deleted['id']}").status_code == 200
        whole = respond(one, **ENDLESS | {"max_output_tokens": 50})
        wait_for(lambda: other.get(f"/v1/responses/{whole['id']}").json()["status"] == "incomplete")
    running = re.compile(r"^vllm:num_requests_running{.*} 0.0$", re.MULTILINE)
    wait_for(lambda: len(running.findall(httpx.get(server.base_url + "/metrics").text)) == 2)


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_what_one_server_makes_is_aborted_at_another(server: ServerProcess, path: str) -> None:
    body: dict[str, Any] = {**BODY, "max_tokens": MAX_TOKENS, "n": 2, "stream": True}
    if path == "/inference/v1/generate":
        sampling = {name: body.pop(name) for name in ("max_tokens", "n", "ignore_eos", "temperature")}
        body = {"model": "tiny", "token_ids": body["prompt"], "stream": True, "sampling_params": sampling}
    reasons, aborted = {}, False
    with clients_of_two(server) as (one, other), one.stream("POST", path, json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line[6:])
            if not aborted:
                ids = [part.get("id") or part["request_id"]]
                assert other.post("/inference/v1/abort_requests", json={"request_ids": ids}).status_code == 200
                aborted = True
            reasons |= {each["index"]: each["finish_reason"] for each in part["choices"]}
    assert reasons == {0: "abort", 1: "abort"}


def test_an_id_is_one_responses_although_two_servers_took_it(server: ServerProcess) -> None:
    """Both begin before either has ended. Only one of the answers is kept, and the other one says so."""
    body = RESPONSE | {"request_id": "resp_mine", "stream": True}

    def read(stream: httpx.Response) -> dict[str, Any]:
        events: list[dict[str, Any]] = [json.loads(each[6:]) for each in stream.iter_lines() if each[:6] == "data: "]
        return events[-1]

    with (
        contextlib.ExitStack() as until_both_have_begun,
        clients_of_two(server) as (one, other),
        ThreadPoolExecutor(2) as pool,
    ):
        until_both_have_begun.enter_context(standing(server))
        with (
            one.stream("POST", "/v1/responses", json=body) as first,
            other.stream("POST", "/v1/responses", json=body) as second,
        ):
            until_both_have_begun.close()
            last = list(pool.map(read, (first, second)))
    [refused] = [each for each in last if each["type"] == "error"]
    [kept] = [each["response"] for each in last if each["type"] != "error"]
    assert "is taken" in refused["message"]
    assert httpx.get(f"{server.base_url}/v1/responses/resp_mine").json() == kept


def test_what_one_server_sent_to_an_engine_the_others_know(server: ServerProcess) -> None:
    """Six prompts that one server has sent to engine 1 alone: the other one finds them there, and takes no turns."""
    prompts = [[number] * 640 for number in range(6, 12)]
    pattern = re.compile(r'^vllm:prefix_cache_hits_total{.*engine="(\d)".*} (\S+)$', re.MULTILINE)

    def hits() -> dict[str, float]:
        return {engine: float(count) for engine, count in pattern.findall(httpx.get(server.base_url + "/metrics").text)}

    before = hits()
    with clients_of_two(server) as (one, other):
        for prompt in prompts:
            body = BODY | {"prompt": prompt, "max_tokens": 1}
            one.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "1"}).raise_for_status()
        time.sleep(2 * PUBLISH_SECONDS)  # the server tells it before it reads the next request
        for client in (one, other):  # both ask the parent, whose messages come in order
            assert client.get("/v1/responses/none").status_code == 404
        for prompt in prompts:
            other.post("/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 1}).raise_for_status()
    wait_for(lambda: hits()["1"] - before["1"] >= 6 * 600)
    assert hits()["0"] == before["0"]


def test_a_killed_server_loses_only_what_it_was_making(server: ServerProcess) -> None:
    with clients_of_two(server) as (one, other):
        victim, kept = owner(one), respond(one)
        making = respond(one, **ENDLESS)
        os.kill(victim, signal.SIGKILL)
        assert other.get(f"/v1/responses/{kept['id']}").json() == kept
        wait_for(lambda: other.get(f"/v1/responses/{making['id']}").json()["status"] == "failed")
        lost = other.get(f"/v1/responses/{making['id']}").json()
        assert "has ended" in lost["error"]["message"]
    wait_for(lambda: len(children(server, "servers.api_server")) == 2)


def test_a_restarted_engine_is_told_to_all_servers(server: ServerProcess) -> None:
    expected = post(server, max_tokens=600)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, server, max_tokens=600) for _ in range(4)]
        os.kill(children(server, "engine_main")[0].pid, signal.SIGKILL)
        assert {each.result() for each in answers} == {expected}

    def serving() -> bool:
        answer = httpx.get(server.base_url + "/health")  # 503 by a server that has just been started again
        return answer.is_success and [each["state"] for each in answer.json()["engines"]] == ["serving", "serving"]

    wait_for(lambda: all(serving() for _ in range(8)))


def test_a_signal_ends_all_of_them(checkpoint: Callable[..., Path], server: ServerProcess) -> None:
    everything = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    assert psutil.wait_procs(everything, timeout=30)[1] == []


def test_nothing_is_left_when_the_parent_is_killed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Servers, engines, workers, a spare engine and a grammar helper, with a stream and a time for it to finish."""
    sockets = Path(tempfile.mkdtemp(prefix="quire-"))  # a socket's path has at most 107 bytes
    server = ServerProcess(
        tmp_path, str(checkpoint("llama", max_position_embeddings=MAX_TOKENS + 5000)), "--served-model-name", "tiny",
        "--api-server-count", "2", "--tensor-parallel-size", "2", "--num-gpu-blocks-override", "5000",
        "--shutdown-timeout", "600", "--enable-warm-spare", env={"QUIRE_RPC_BASE_PATH": str(sockets)},
    ).wait_until_ready()  # fmt: skip
    post(server, structured_outputs={"regex": "a+"})
    parent = psutil.Process(server.process.pid)
    with httpx.stream(
        "POST", f"{server.base_url}/v1/completions", json=BODY | {"max_tokens": MAX_TOKENS, "stream": True}
    ):
        wait_for(lambda: len(children(server, "engine_main")) == 2)
        wait_for(lambda: len(parent.children(recursive=True)) >= 2 + 2 + 4 + 1)
        left = parent.children(recursive=True)
        parent.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(left, 20)
    assert alive == []
    wait_for(lambda: list(sockets.iterdir()) == [])
    sockets.rmdir()

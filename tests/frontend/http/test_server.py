"""Running the server: sockets, loading, signals, draining. The engine is real; the server runs in this process."""

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.config.resolved import SchedulerLimits
from quire.core.engine.client import EngineClient
from quire.core.errors import ConfigError, EngineDeadError, ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec, shares_prefixes
from quire.core.wire.protocol import EngineReady
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http import event_stream
from quire.frontend.http.connections.listener import bind, url_of
from quire.frontend.http.server import serve
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.service.metrics_page import cache_facts, cache_room
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import engine_config

LONG = {"prompt": "on and on", "max_tokens": 2000, "ignore_eos": True}

Scenario = Callable[[httpx.AsyncClient], Awaitable[Any]]


def run(
    checkpoint: Path,
    scenario: Scenario,
    *,
    tls: ssl.SSLContext | None = None,
    engine_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Serves `checkpoint` while `scenario` runs, which must end the server; returns what the scenario returned."""

    async def main() -> Any:
        server = ServerConfig(**{"host": "127.0.0.1", "port": 0, **options})
        listener = bind(server)
        engine = AsyncLLM.from_engine_args(model=str(checkpoint), num_gpu_blocks_override=512, **(engine_options or {}))
        serving = asyncio.create_task(serve(engine, server, listener))
        transport = httpx.AsyncHTTPTransport(uds=server.uds, verify=tls or False)
        url = "http://localhost" if server.uds else url_of(listener, server)
        async with httpx.AsyncClient(transport=transport, base_url=url, timeout=60) as client:
            waiting = asyncio.create_task(until_ready(client))
            await asyncio.wait([waiting, serving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                waiting.cancel()
                serving.result()  # what ended the server, rather than that nobody listens
            await waiting
            result = await scenario(client)
        await asyncio.wait_for(serving, 60)
        return result

    return asyncio.run(main())


async def until_ready(client: httpx.AsyncClient) -> None:
    while (status := (await client.get("/health")).status_code) != 200:
        assert status == 503
        await asyncio.sleep(0.02)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def stream_until_stopped(
    client: httpx.AsyncClient, max_tokens: int = 2000, stopped: asyncio.Event | None = None
) -> list[str]:
    """Starts a stream, sends SIGTERM after its first event (and sets `stopped`), and returns all events."""
    events = []
    body = {**LONG, "max_tokens": max_tokens, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not events:
                stop()
                if stopped is not None:
                    stopped.set()
            if line:
                events.append(line)
    return events


def test_without_a_timeout_running_requests_end_at_once_with_an_error(checkpoint: Callable[..., Path]) -> None:
    async def scenario(client: httpx.AsyncClient) -> tuple[httpx.Response, list[str]]:
        waiting = asyncio.create_task(client.post("/v1/completions", json=LONG))
        events = await stream_until_stopped(client)
        return await waiting, events

    answer, events = run(checkpoint("llama"), scenario)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers
    assert "shutting down" in events[-2]
    assert events[-1] == "data: [DONE]"


def test_with_a_timeout_running_requests_finish_and_new_ones_are_refused(checkpoint: Callable[..., Path]) -> None:
    async def scenario(client: httpx.AsyncClient) -> tuple[int, list[str]]:
        await client.get("/version")  # leaves an idle connection open, which may outlive the listener
        stopped = asyncio.Event()
        events = asyncio.create_task(stream_until_stopped(client, max_tokens=400, stopped=stopped))
        await stopped.wait()
        await asyncio.sleep(0.02)
        try:
            late = (await client.post("/v1/completions", json=LONG)).status_code
        except httpx.TransportError:
            late = 503
        return late, await events

    late, events = run(checkpoint("llama"), scenario, shutdown_timeout=60)
    assert late == 503
    assert '"finish_reason":"length"' in events[-2]
    assert events[-1] == "data: [DONE]"


def test_full_queue_is_429_with_retry_after(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may need more than the second after which a stream's headers are sent without a first event.
    monkeypatch.setattr(event_stream, "UNDECIDED_SECONDS", 60.0)
    # And the first request must not end before the last one has come.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", "tests.executor.doubles:SlowWorker")

    async def scenario(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [{**LONG, "stream": index % 2 == 1} for index in range(8)]
        pending = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        refused = []
        for each in asyncio.as_completed(pending):
            refused.append(await each)
            if len(refused) == 6:
                break
        metrics = await client.get("/metrics")
        assert 'reason="max_num_queued_reqs"} 6.0' in metrics.text
        stop()
        await asyncio.gather(*pending)
        return refused

    engine_options = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    refused = run(checkpoint("llama"), scenario, engine_options=engine_options)
    assert [answer.status_code for answer in refused] == [429] * 6
    for answer in refused:
        assert f"Try again in {int(answer.headers['retry-after'])} s." in answer.json()["error"]["message"]
    assert refused[0].json()["error"]["type"] == "RateLimitError"


@pytest.mark.usefixtures("without_model")
def test_unix_socket_is_served_and_removed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # as a killed server leaves it

    async def scenario(client: httpx.AsyncClient) -> int:
        with pytest.raises(ConfigError, match="in use"):
            bind(ServerConfig(uds=str(path)))
        status = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code
        stop()
        return status

    assert run(checkpoint("llama"), scenario, uds=str(path)) == 200
    assert not path.exists()


@pytest.mark.usefixtures("without_model")
def test_tls_with_a_path_prefix(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )

    async def scenario(client: httpx.AsyncClient) -> tuple[list[int], list[dict[str, str]]]:
        assert str(client.base_url).startswith("https://127.0.0.1:")
        answers = [await client.get(path) for path in ("/v1/models", "/llm/v1/models", "/llm/openapi.json")]
        stop()
        return [answer.status_code for answer in answers], answers[2].json()["servers"]

    options = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate), "root_path": "/llm"}
    context = ssl.create_default_context(cafile=str(certificate))
    assert run(checkpoint("llama"), scenario, tls=context, **options) == ([200] * 3, [{"url": "/llm"}])


def test_model_that_cannot_be_loaded_ends_the_server(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("llama"), broken)
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(b"nonsense")
    server = ServerConfig(host="127.0.0.1", port=0)

    async def main() -> None:
        await serve(AsyncLLM.from_engine_args(model=str(broken)), server, bind(server))

    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        asyncio.run(main())


def test_signal_while_the_model_loads_ends_the_server(checkpoint: Callable[..., Path]) -> None:
    server = ServerConfig(host="127.0.0.1", port=0)

    async def main() -> None:
        listener = bind(server)
        engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")))
        asyncio.get_running_loop().call_later(0.1, stop)
        await asyncio.wait_for(serve(engine, server, listener), 60)

    asyncio.run(main())


@pytest.mark.usefixtures("without_model")
def test_signal_as_loading_ends_ends_the_server(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The model is there when the server, which was told to stop, has closed its socket but not ended."""
    server = ServerConfig(host="127.0.0.1", port=0)

    async def main() -> None:
        listener = bind(server)

        class LoadedTooLate(AsyncLLM):
            async def start(self) -> EngineReady:
                ready = await super().start()
                stop()
                while listener.fileno() >= 0:
                    await asyncio.sleep(0)
                return ready

        engine = LoadedTooLate.from_engine_args(model=str(checkpoint("llama")))
        await asyncio.wait_for(serve(engine, server, listener), 60)

    with caplog.at_level("INFO", logger="quire"):
        asyncio.run(main())
    assert [record.message for record in caplog.records if record.message.startswith("ready")] == []


@pytest.mark.usefixtures("without_model")
def test_death_of_the_engine_for_good_ends_the_server(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: EngineClient) -> None:
        raise EngineDeadError("it crashed too often")

    async def scenario(client: httpx.AsyncClient) -> tuple[int, int]:
        monkeypatch.setattr(EngineClient, "check_health", die)
        return (await client.get("/health")).status_code, (await client.post("/ping")).status_code

    with pytest.raises(EngineDeadError, match="too often"):
        assert run(checkpoint("llama"), scenario) == (503, 503)


def test_port_in_use_is_told_before_anything_is_loaded() -> None:
    first = bind(ServerConfig(host="127.0.0.1", port=0))
    port = first.getsockname()[1]
    try:
        with pytest.raises(ConfigError, match=f"Port {port} is in use"):
            bind(ServerConfig(host="127.0.0.1", port=port))
    finally:
        first.close()


def test_port_for_privileged_processes_is_told() -> None:
    start = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if os.geteuid() == 0 or not start.exists() or int(start.read_text()) <= 80:
        pytest.skip("this process may listen on port 80")
    with pytest.raises(ConfigError, match="Port 80 is only for privileged processes"):
        bind(ServerConfig(host="127.0.0.1", port=80))


def test_host_that_is_not_ours_is_told() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on 192\.0\.2\.1"):
        bind(ServerConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match="cannot resolve"):
        bind(ServerConfig(host="no such host", port=0))


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:{port}"),
        ({"root_path": "/llm"}, "http://localhost:{port}"),
        ({"host": "::1"}, "http://[::1]:{port}"),
    ],
)
def test_url_is_one_that_clients_can_use(options: dict[str, Any], url: str) -> None:
    server = ServerConfig(port=0, **options)
    try:
        listener = bind(server)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert url_of(listener, server) == url.format(port=listener.getsockname()[1])
    listener.close()


def test_room_in_the_cache_counts_a_token_once_however_many_groups_keep_it() -> None:
    full = KVGroupSpec("full", [5], page_bytes=64)
    windows = [KVGroupSpec("window", [layer], page_bytes=64, window=64) for layer in range(5)]

    def room(*groups: KVGroupSpec) -> tuple[int, float]:
        ready = EngineReady(4096, 16, 16_384, 0, 0, "cpu", list(groups), caches_prefixes=True)
        return cache_room(ready, SchedulerLimits(max_num_seqs=7, max_num_batched_tokens=512))

    assert room(full) == (65_536, 4)
    pages_of_a_window = (64 - 1 + 512 - 1 + 15) // 16 + 1
    num_requests = 4096 / (1024 + 5 * pages_of_a_window)
    assert room(*windows, full) == (round(num_requests * 16_384), num_requests)
    state = KVGroupSpec("recurrent", [0], page_bytes=64, state_bytes=1000, interval=512)
    assert room(full, state) == room(full)
    assert room(state) == (7 * 16_384, 7), "as many requests as there are slots"


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_metrics_do_not_tell_of_a_prefix_cache_that_a_model_cannot_have(whole_prompts: bool) -> None:
    groups = [KVGroupSpec("full", [0], page_bytes=64)]
    caches_prefixes = shares_prefixes(groups, whole_prompts=whole_prompts)
    ready = EngineReady(4096, 16, 256, 0, 0, "cpu", groups, caches_prefixes=caches_prefixes)
    assert cache_facts(engine_config(), ready)["enable_prefix_caching"] == str(not whole_prompts)

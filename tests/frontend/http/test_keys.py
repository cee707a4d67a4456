"""Keys of a file are kept apart: limits, stored entries, the prefix cache, and routes for administrators."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from quire.core.errors import ConfigError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.cli.main import main
from quire.frontend.http.app import create_app
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.keys.rate_limits import RateLimits
from tests.servers import ServerProcess, free_port

KEYS = [
    {"name": "ann", "key": "one"},
    {"name": "bob", "key": "two", "weight": 2},
    {"name": "few", "key": "three", "requests_per_minute": 2},
    {"name": "short", "key": "four", "tokens_per_minute": 30},
]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def serving(
    checkpoint: Callable[..., Path], folder: Path, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, CollectorRegistry]]:
    path = folder / "keys.json"
    path.write_text(json.dumps(KEYS))
    server = ServerConfig(api_key_file=str(path), **options)
    registry = CollectorRegistry()
    async with AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu", max_num_seqs=4) as engine:
        app = create_app(engine, server, registry=registry, keys=server.key_ring(RateLimits()))
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
            yield http, registry


async def complete(http: httpx.AsyncClient, key: str, prompt: str = PROMPT, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
    return await http.post("/v1/completions", json=body, headers=by(key))


def test_keys_are_kept_apart(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    async def main() -> None:
        options = {"enable_prompt_tokens_details": True, "max_stored_responses": 6}
        async with serving(checkpoint, tmp_path, **options) as (http, registry):
            await check_cache(http)
            await check_entries(http)
            await check_aborts(http)
            await check_limits(http)
            check_usage(generate_latest(registry).decode())

    asyncio.run(main())


async def check_cache(http: httpx.AsyncClient) -> None:
    """What one key has computed, another does not find, whatever salt it names."""

    async def num_cached(key: str, **fields: Any) -> int:
        usage = (await complete(http, key, **fields)).json()["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    assert await num_cached("one") == 0
    assert await num_cached("one") > 0
    assert [await num_cached("two", cache_salt=salt) for salt in ("x", "ann:", "ann")] == [0, 0, 0]
    assert await num_cached("two") == 0
    texts = {(await complete(http, key)).json()["choices"][0]["text"] for key in ("one", "two")}
    assert len(texts) == 1


async def check_entries(http: httpx.AsyncClient) -> None:
    """Nobody finds, changes or drops what another key has stored."""
    body = {"input": "Hello", "max_output_tokens": 4, "request_id": "resp_mine"}
    mine = (await http.post("/v1/responses", json=body, headers=by("one"))).json()["id"]
    conversation = (await http.post("/v1/conversations", json={}, headers=by("one"))).json()["id"]
    for method, path in (
        ("GET", f"/v1/responses/{mine}"),
        ("DELETE", f"/v1/responses/{mine}"),
        ("POST", f"/v1/responses/{mine}/cancel"),
        ("GET", f"/v1/conversations/{conversation}"),
        ("DELETE", f"/v1/conversations/{conversation}"),
        ("GET", f"/v1/conversations/{conversation}/items"),
    ):
        assert (await http.request(method, path, headers=by("two"))).status_code == 404, path
    continued = {"input": "Go on", "previous_response_id": mine, "max_output_tokens": 4}
    assert (await http.post("/v1/responses", json=continued, headers=by("two"))).status_code == 404
    own = await http.post("/v1/responses", json=body, headers=by("two"))
    assert own.status_code == 200, "its ids may be those of another's entries"
    for _ in range(20):
        assert (await http.post("/v1/conversations", json={}, headers=by("two"))).status_code in (200, 201)
    for path in (f"/v1/responses/{mine}", f"/v1/conversations/{conversation}"):
        assert (await http.get(path, headers=by("one"))).status_code == 200, "no other key drops it"


async def check_aborts(http: httpx.AsyncClient) -> None:
    """Who knows the id of another key's request cannot end it."""
    sampling = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    body = {"token_ids": [5, 6], "sampling_params": sampling, "request_id": "mine"}
    running = asyncio.create_task(http.post("/inference/v1/generate", json=body, headers=by("one")))
    await asyncio.sleep(0.01)
    ids = {"request_ids": ["mine"]}
    assert (await http.post("/inference/v1/abort_requests", json=ids, headers=by("two"))).status_code == 200
    await complete(http, "two", "a")  # the engine has read the message before it
    assert not running.done()
    assert (await http.post("/inference/v1/abort_requests", json=ids, headers=by("one"))).status_code == 200
    assert (await running).json()["choices"][0]["finish_reason"] == "abort"


async def check_limits(http: httpx.AsyncClient) -> None:
    """A key past its limits is told how long to wait; others are not disturbed."""
    assert [(await complete(http, "three")).status_code for _ in range(3)] == [200, 200, 429]
    refused = await complete(http, "three")
    assert 1 <= int(refused.headers["Retry-After"]) <= 61
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert "'few' may use 2 requests a minute" in refused.json()["error"]["message"]
    assert [(await complete(http, "four", "a b c", max_tokens=40)).status_code for _ in range(2)] == [200, 429]
    assert (await complete(http, "one")).status_code == 200


def check_usage(text: str) -> None:
    """/metrics shows each key by its name, from the beginning, and no key."""
    counts = {
        line.partition("}")[0] + "}": float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("quire:key_")
    }
    assert counts['quire:key_refused_requests_total{key="few"}'] == 2
    assert counts['quire:key_refused_tokens_total{key="short"}'] == 1
    assert counts['quire:key_generation_tokens_total{key="short"}'] == 40
    assert counts['quire:key_requests_total{key="few"}'] == 2
    assert counts['quire:key_prompt_tokens_total{key="ann"}'] > 0
    assert {label.split('"')[1] for label in counts} == {"ann", "bob", "few", "short"}


def test_administrators_have_keys_of_their_own(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_SERVER_DEV_MODE", "1")
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu")

    async def statuses(server: ServerConfig, *keys: str) -> list[int]:
        transport = httpx.ASGITransport(create_app(engine, server))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:
            return [(await http.get("/server_info", headers=by(key) if key else {})).status_code for key in keys]

    async def main() -> None:
        own = ServerConfig(api_key_file=str(path), admin_api_key=["root"])
        assert await statuses(own, "", "one", "root") == [401, 403, 200]
        assert await statuses(ServerConfig(api_key=["k"]), "", "k") == [401, 403], "no administrator was named"
        assert await statuses(ServerConfig(admin_api_key=["root"]), "", "k", "root") == [401, 403, 200]
        assert await statuses(ServerConfig(), "") == [200], "a server that asks nobody for a key"

    asyncio.run(main())


def test_a_key_that_left_the_file_opens_nothing(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    server = ServerConfig(api_key_file=str(path))
    keys = server.key_ring(RateLimits())
    assert keys is not None
    engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu")

    async def main() -> None:
        transport = httpx.ASGITransport(create_app(engine, server, keys=keys))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:
            assert (await http.get("/v1/models", headers=by("two"))).status_code == 200
            path.write_text(json.dumps(KEYS[:1]))
            os.utime(path, (1, 1))
            keys.check()
            assert (await http.get("/v1/models", headers=by("two"))).status_code == 401
            assert (await http.get("/v1/models", headers=by("one"))).status_code == 200

    asyncio.run(main())


def test_a_signal_to_the_first_process_renews_the_keys_of_all_servers(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(KEYS))
    options = ["--api-server-count", "2", "--api-key-file", str(path), "--device", "cpu"]
    server = ServerProcess(tmp_path, str(checkpoint("llama")), *options).wait_until_ready()

    def status() -> set[int]:
        asked = [httpx.get(f"{server.base_url}/v1/models", headers=by("new")) for _ in range(8)]
        return {response.status_code for response in asked}

    try:
        assert status() == {401}
        path.write_text(json.dumps([{"name": "new", "key": "new"}]))
        server.process.send_signal(signal.SIGHUP)
        ends = time.monotonic() + 30
        while status() != {200}:
            assert time.monotonic() < ends, server.logs()
            time.sleep(0.05)
    finally:
        assert server.stop() == 0


def test_administrators_have_a_port_of_their_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    port = free_port()
    options = ["--admin-port", str(port), "--api-key", "one", "--device", "cpu"]
    env = {"QUIRE_SERVER_DEV_MODE": "1"}
    server = ServerProcess(tmp_path, str(checkpoint("llama")), *options, env=env).wait_until_ready()
    try:
        refused = httpx.post(f"{server.base_url}/reset_prefix_cache", headers=by("one"))
        assert (refused.status_code, "--admin-port" in refused.text) == (403, True)
        assert httpx.post(f"http://127.0.0.1:{port}/reset_prefix_cache").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        assert httpx.get(f"{server.base_url}/v1/models", headers=by("one")).status_code == 200
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("value", ["", "x", "localhost", "0", "1:70000", "-1"])
def test_a_wrong_port_for_administrators_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="--admin-port must be PORT or HOST:PORT"):
        ServerConfig(admin_port=value)


def test_one_server_of_several_has_no_port_for_administrators(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--admin-port", str(free_port()), "--api-server-count", "2", "--port", str(free_port())])
    assert "--admin-port is for one API server" in capfd.readouterr().err

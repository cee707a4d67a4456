"""Routes for operators and routers, asked of a real server."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.servers import ServerProcess

KEY, ADMIN, HUB_TOKEN = "opensesame", "openthegate", "hf_donottell"
SHARED = "The quick brown fox jumps over the lazy dog, again and again, until the page is full of it. " * 4


@pytest.fixture(scope="module")
def dev_server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for developers, with a key."""
    process = ServerProcess(
        tmp_path_factory.mktemp("dev"), str(checkpoint("llama")), "--served-model-name", "tiny", "--api-key", KEY,
        "--admin-api-key", ADMIN, "--hf-token", HUB_TOKEN, "--enable-server-load-tracking",
        "--enable-prompt-tokens-details",
        "--show-hidden-metrics-for-version", "0.31",
        env={"QUIRE_SERVER_DEV_MODE": "1", "HF_TOKEN": HUB_TOKEN, "QUIRE_LOGGING_PREFIX": "mark: "},
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="module")
def http(dev_server: ServerProcess) -> Iterator[httpx.Client]:
    """A client with the key in one header, and the administrator's in the other."""
    headers = {"Authorization": f"Bearer {KEY}", "x-api-key": ADMIN}
    with httpx.Client(base_url=dev_server.base_url, headers=headers, timeout=60) as client:
        yield client


def complete(http: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields})
    return answer.raise_for_status().json()


def num_cached(http: httpx.Client, prompt: str) -> int:
    return complete(http, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]


# --------------------------------------------------------------------------------------------------------- development


def test_hits_disappear_with_a_reset(http: httpx.Client) -> None:
    complete(http, SHARED)
    assert num_cached(http, SHARED) > 0
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert num_cached(http, SHARED) == 0
    assert num_cached(http, SHARED) > 0
    assert http.post("/reset_prefix_cache", params={"reset_external": True}).json() == {"success": True}
    assert num_cached(http, SHARED) == 0


def test_running_requests_go_on_after_a_reset(dev_server: ServerProcess, http: httpx.Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 1800, "ignore_eos": True, "seed": 7, "temperature": 1.0}
    expected = complete(http, SHARED, **fields)["choices"][0]["text"]
    begun, texts = threading.Event(), []

    def stream() -> None:
        client = openai.OpenAI(base_url=f"{dev_server.base_url}/v1", api_key=KEY)
        extra = {"ignore_eos": fields.pop("ignore_eos")}
        for chunk in client.completions.create(model="tiny", prompt=SHARED, stream=True, extra_body=extra, **fields):
            texts.append(chunk.choices[0].text)
            begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(60)
    held = http.post("/reset_prefix_cache").json()
    taken = http.post("/reset_prefix_cache", params={"reset_running_requests": "true"}).json()
    was_running = reader.is_alive()
    reader.join()
    assert was_running
    assert (held, taken) == ({"success": False}, {"success": True})
    assert "".join(texts) == expected
    assert "vllm:num_preemptions_total{" in (metrics := http.get("/metrics").text)
    assert [line.split()[-1] for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total")] == [
        "1.0"
    ]


def test_server_info_tells_options_and_variables_but_no_secrets(http: httpx.Client) -> None:
    answers = [http.get("/server_info", params=params) for params in ({}, {"config_format": "json"})]
    for answer in answers:
        assert answer.status_code == 200
        assert KEY not in answer.text
        assert ADMIN not in answer.text
        assert HUB_TOKEN not in answer.text
        info = answer.json()
        assert set(info) == {"vllm_config", "server_config", "vllm_env", "system_env"}
        assert info["server_config"]["enable_server_load_tracking"] is True
        assert info["server_config"]["api_key"] == info["server_config"]["admin_api_key"] == ["***"]
        assert info["vllm_env"]["QUIRE_SERVER_DEV_MODE"] is True
        assert info["vllm_env"]["QUIRE_LOGGING_PREFIX"] == "mark: "
        assert not [name for name in info["vllm_env"] if "KEY" in name]
        assert info["system_env"]["torch_version"]
    text, parsed = (answer.json()["vllm_config"] for answer in answers)
    assert "max_num_seqs=" in text
    assert parsed["limits"]["max_num_seqs"] > 0
    assert http.get("/server_info", params={"config_format": "yaml"}).status_code == 400


def test_the_developers_routes_ask_for_the_key_and_are_documented(dev_server: ServerProcess) -> None:
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/server_info")):
        assert httpx.request(method, dev_server.base_url + path).status_code == 401
    paths = httpx.get(f"{dev_server.base_url}/openapi.json", timeout=60).json()["paths"]
    names = {each["name"] for each in paths["/reset_prefix_cache"]["post"]["parameters"]}
    assert names == {"reset_running_requests", "reset_external"}
    assert "/server_info" in paths


def test_other_servers_have_no_routes_for_developers(base_url: str) -> None:
    assert httpx.post(f"{base_url}/reset_prefix_cache").status_code == 404
    assert httpx.get(f"{base_url}/server_info").status_code == 404


# ----------------------------------------------------------------------------------------------------------------- load


def test_load_counts_requests_in_flight(http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    # So much that the next request may wait for a core meanwhile.
    fields = {"model": "tiny", "prompt": SHARED, "max_tokens": 700, "n": 64, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=fields) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.get("/load").json() == {"server_load": 1}
        assert list(lines)
    assert http.get("/load").json() == {"server_load": 0}


def test_whole_answers_tell_the_load_to_those_who_ask(http: httpx.Client) -> None:
    def report(path: str, asked: str | None, **fields: Any) -> str | None:
        body = {"model": "tiny", "max_tokens": 2, **fields}
        answer = http.post(path, json=body, headers={} if asked is None else {"endpoint-load-metrics-format": asked})
        return answer.raise_for_status().headers.get("endpoint-load-metrics")

    text, chat = {"prompt": SHARED}, {"messages": [{"role": "user", "content": SHARED}]}
    for path, fields in (("/v1/completions", text), ("/v1/chat/completions", chat), ("/invocations", text)):
        for asked in ("TEXT", "text"):
            words = (report(path, asked, **fields) or "").split()
            assert words[0] == "TEXT"
            named = dict(word.rstrip(",").split("=") for word in words[1:])
            assert set(named) == {"named_metrics.num_requests_waiting", "named_metrics.kv_cache_usage_perc"}
        kind, _, written = (report(path, "JSON", **fields) or "").partition(" ")
        assert kind == "JSON"
        assert set(json.loads(written)["named_metrics"]) == {"num_requests_waiting", "kv_cache_usage_perc"}
        assert report(path, None, **fields) is None
        assert report(path, "BIN", **fields) is None
        assert report(path, "TEXT", stream=True, **fields) is None


def test_the_load_that_is_told_is_that_of_other_requests(http: httpx.Client) -> None:
    # A request that ends by leaving it: one of a few hundred tokens is done before a busy machine sends the next.
    fields = {"model": "tiny", "prompt": SHARED, "max_tokens": 1700, "n": 64, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=fields) as running:
        lines = running.iter_lines()
        next(lines)
        body, asked = {"model": "tiny", "prompt": "x", "max_tokens": 1}, {"endpoint-load-metrics-format": "JSON"}
        told = http.post("/v1/completions", json=body, headers=asked).headers["endpoint-load-metrics"]
    assert 0 < json.loads(told.removeprefix("JSON "))["named_metrics"]["kv_cache_usage_perc"] <= 1


# -------------------------------------------------------------------------------------------------------------- metrics


def _families(http: httpx.Client) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def _tokens(families: dict[str, Metric]) -> tuple[float, float]:
    """Tokens of all steps, and those of computed prompts and of outputs."""
    samples = families["vllm:iteration_tokens_total"].samples
    [stepped] = [each.value for each in samples if each.name.endswith("_sum")]
    by_source = {each.labels["source"]: each.value for each in families["vllm:prompt_tokens_by_source"].samples}
    [generated] = families["vllm:generation_tokens"].samples
    return stepped, by_source["local_compute"] + generated.value


def test_metrics_tell_the_size_of_the_cache_and_the_tokens_of_steps(http: httpx.Client, base_url: str) -> None:
    before, families = _tokens(_families(http)), {}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # requests that other tests left may still be counted
        complete(http, SHARED)
        families = _families(http)
        tokens = _tokens(families)
        new = [after - former for after, former in zip(tokens, before, strict=True)]
        if new[0] == new[1] > 0:
            break
        before = tokens
    assert new[0] == new[1], "of the steps, and of prompts and outputs"
    [info] = families["vllm:cache_config_info"].samples
    size, blocks = (int(info.labels[name]) for name in ("kv_cache_size_tokens", "num_gpu_blocks"))
    assert size == blocks * int(info.labels["block_size"])
    assert float(info.labels["kv_cache_max_concurrency"]) == pytest.approx(size / 2048)
    assert info.labels["enable_prefix_caching"] == "True"
    others = text_string_to_metric_families(httpx.get(f"{base_url}/metrics").text)
    shown = {name for name in families if not name.startswith("quire:key_")}  # which the other server has no use for
    assert shown == {family.name for family in others}  # vLLM 0.32 hides none


def test_head_is_get_without_a_body(base_url: str) -> None:
    """Monitors ask so, and coding agents, before they send anything."""
    with httpx.Client(base_url=base_url) as client:
        for path in ("/", "/health", "/v1/models"):
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"]
            if path != "/health":  # which tells the age of the engine's last sign of life
                assert head.headers["content-length"] == got.headers["content-length"]
        assert client.head("/v1/completions").status_code == 405
        assert client.head("/nowhere").status_code == 404
        assert client.get("/health").status_code == 200  # on the same connection

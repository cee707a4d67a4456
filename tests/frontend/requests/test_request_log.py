"""Requests and outputs in the log of a server: what shows at which level, and what only where it is asked for."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from quire import AsyncLLM, SamplingParams
from quire.core.config.observability import ObservabilityConfig
from quire.core.errors import ConfigError
from quire.frontend.http.server_config import ServerConfig
from tests.servers import WITHOUT_MODEL, ServerProcess

WORDS = "The quick brown fox"
BODY = {"prompt": WORDS, "max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("logs"), str(checkpoint("llama", chat=True)), "--served-model-name", "tiny",
        "--enable-log-requests", "--enable-log-outputs", "--max-log-len", "9",
        "--disable-access-log-for-endpoints", "/health, /metrics", env={"QUIRE_LOG_STATS_INTERVAL": "3600"},
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


def lines_of(served: ServerProcess, method: str, path: str, **options: object) -> tuple[httpx.Response, list[str]]:
    """The answer, and the lines that the server logged of the request; the engine has its own."""
    before = len(served.logs())
    answer = httpx.request(method, served.base_url + path, timeout=60, **options)  # type: ignore[arg-type]
    httpx.get(f"{served.base_url}/version")  # its line comes last
    lines = [line for line in served.logs()[before:].splitlines() if " serve  " in line]
    [*rest, last] = lines
    assert '"GET /version HTTP/1.1" 200 OK' in last
    return answer, rest


def test_a_request_is_logged_with_its_parameters_and_its_output(served: ServerProcess) -> None:
    answer, lines = lines_of(served, "POST", "/v1/completions", json=BODY)
    request_id, text = answer.json()["id"], answer.json()["choices"][0]["text"]
    received, summary, generated, access = lines
    assert re.search(rf"Received request {request_id}\S*: params: SamplingParams\(n=1, .*max_tokens=3.*\), ", received)
    assert "prompt tokens: " in received
    assert f"Generated response {request_id}" in generated
    assert generated.endswith(f"output: {text[:9]!r}, finish_reason: length")
    assert "3 output tokens, length" in summary
    assert re.search(r' INFO +serve  127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" 200 OK$', access)


def test_a_stream_is_logged_in_parts_and_whole(served: ServerProcess) -> None:
    _, lines = lines_of(served, "POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 5})
    told = [line for line in lines if "Generated response" in line]
    assert [" (streaming delta)" in line for line in told] == [True] * (len(told) - 1) + [False]
    assert len(told) >= 2  # a busy machine merges parts
    assert " (streaming complete): output: " in told[-1]
    assert told[-1].endswith("finish_reason: length")


def test_a_beam_search_is_one_request(served: ServerProcess) -> None:
    _, lines = lines_of(served, "POST", "/v1/completions", json={**BODY, "use_beam_search": True, "n": 2})
    assert len([line for line in lines if "Received request" in line]) == 1
    assert "BeamSearchParams(" in lines[0]


def test_prompts_are_not_logged_at_level_info(served: ServerProcess) -> None:
    lines_of(served, "POST", "/v1/completions", json=BODY)
    chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
    lines_of(served, "POST", "/v1/chat/completions", json=chat)
    assert WORDS[:9] not in served.logs()


def test_the_access_log_leaves_out_paths(served: ServerProcess) -> None:
    for path in ("/health", "/metrics", "/health?a=b"):
        answer, lines = lines_of(served, "GET", path)
        assert (answer.status_code, lines) == (200, [])
    answer, lines = lines_of(served, "GET", "/nowhere?a=b")
    assert '"GET /nowhere?a=b HTTP/1.1" 404 Not Found' in lines[-1]


def test_the_access_log_tells_the_clients_address_behind_a_proxy_on_this_machine(served: ServerProcess) -> None:
    _, [line] = lines_of(served, "GET", "/v1/models", headers={"X-Forwarded-For": "192.0.2.7"})
    assert '192.0.2.7:0 - "GET /v1/models' in line


@pytest.mark.parametrize(
    ("options", "is_told"),
    [((), True), (("--disable-uvicorn-access-log",), False), (("--uvicorn-log-level", "warning"), False)],
)
def test_the_access_log_can_be_left_out(
    checkpoint: Callable[..., Path], tmp_path: Path, options: tuple[str, ...], is_told: bool
) -> None:
    server = ServerProcess(tmp_path, str(checkpoint("llama")), *options, program=WITHOUT_MODEL).wait_until_ready()
    assert httpx.get(f"{server.base_url}/nowhere", timeout=60).status_code == 404
    server.stop()
    assert ("GET /nowhere" in server.logs()) is is_told
    assert "ready" in server.logs()


def test_prompts_and_ids_show_at_level_debug(checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm = AsyncLLM.from_engine_args(
            model=str(checkpoint("llama")), num_gpu_blocks_override=64, enable_log_requests=True, max_log_len=3,
            log_outputs=True,
        )  # fmt: skip
        async with llm:
            sampling = SamplingParams(max_tokens=5, ignore_eos=True)
            async for _ in llm.generate({"prompt_token_ids": [7, 8, 9, 10], "prompt": "abcdef"}, sampling, "r"):
                pass

    with caplog.at_level("DEBUG", logger="quire"):
        asyncio.run(main())
    messages = [record.getMessage() for record in caplog.records]
    assert "Request r details: prompt: 'abc', prompt_token_ids: [7, 8, 9]." in messages
    [ids] = [line for line in messages if "details: output_token_ids" in line]
    assert len(ids.split("[")[1].split(",")) == 3


def test_outputs_are_not_logged_without_requests() -> None:
    server = ServerConfig(enable_log_outputs=True)
    server.check_logs(ObservabilityConfig(enable_log_requests=True))
    with pytest.raises(ConfigError, match="--enable-log-requests"):
        server.check_logs(ObservabilityConfig())

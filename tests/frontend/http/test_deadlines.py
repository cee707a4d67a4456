"""A request ends when its time is over, waiting or running, and frees what it held."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.errors import DeadlineError, ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.app import create_app
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.requests.deadline import current_deadline, limit_time

LONG = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {}},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5]},
}
"""Bodies with the field."""


@pytest.mark.parametrize(
    ("header", "field", "seconds"), [(None, None, None), ("2", None, 2.0), (None, 0.5, 0.5), ("2.5", 9.0, 2.5)]
)
def test_the_shorter_time_holds(header: str | None, field: float | None, seconds: float | None) -> None:
    limit_time(header, field)
    deadline = current_deadline()
    assert (None if deadline is None else deadline.seconds) == seconds
    limit_time(None, None)


@pytest.mark.parametrize(
    ("header", "field", "name"),
    [
        ("soon", None, "X-Request-Timeout"),
        ("nan", None, "X-Request-Timeout"),
        (None, 0.0, "timeout"),
        (None, -1, "timeout"),
    ],
)
def test_what_is_no_time_is_refused_by_name(header: str | None, field: float | None, name: str) -> None:
    with pytest.raises(ParameterError, match="seconds above 0") as caught:
        limit_time(header, field)
    assert caught.value.param == name


def test_a_deadline_that_has_passed_is_an_error() -> None:
    limit_time(None, 1e-9)
    deadline = current_deadline()
    assert deadline is not None
    with pytest.raises(DeadlineError, match="within its timeout of 1e-09 s"):
        deadline.check()
    limit_time(None, None)


def test_requests_end_in_time(checkpoint: Callable[..., Path]) -> None:
    async def main() -> None:
        options: dict[str, Any] = {
            "device": "cpu",
            "max_num_seqs": 1,
            "max_model_len": 2048,
            "served_model_name": "tiny",
        }
        async with AsyncLLM.from_engine_args(model=str(checkpoint("llama")), **options) as engine:
            transport = httpx.ASGITransport(create_app(engine, ServerConfig()))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=120) as http:
                await check(http)
                assert engine.num_unfinished == 0
                async with asyncio.timeout(60):  # within the step that runs
                    while engine.client.num_unfinished:
                        await asyncio.sleep(0.01)
                answer = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2, "timeout": 100})
                assert answer.status_code == 200, "nothing holds the only slot"

    asyncio.run(main())


async def check(http: httpx.AsyncClient) -> None:
    whole = await http.post("/v1/completions", json=LONG, headers={"X-Request-Timeout": "0.2"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, 504)
    assert "timeout of 0.2 s" in whole.json()["error"]["message"]
    stream = await http.post("/v1/completions", json=LONG | {"timeout": 0.3, "stream": True})
    assert '"code":504' in stream.text
    running, waiting = await asyncio.gather(
        http.post("/v1/completions", json=LONG | {"timeout": 0.4}),
        http.post("/v1/completions", json=LONG | {"timeout": 0.2}),
    )
    assert [running.status_code, waiting.status_code] == [504, 504]
    for path, body in EVERYWHERE.items():
        assert (await http.post(path, json=body | {"timeout": 1e-6})).status_code == 504, path
        assert (await http.post(path, json=body, headers={"X-Request-Timeout": "0.000001"})).status_code == 504, path
        refused = await http.post(path, json=body | {"timeout": 0})
        assert refused.status_code == 400, path
        assert "timeout must be a number of seconds above 0" in refused.text
    wrong = await http.post("/v1/completions", json=LONG | {"timeout": -1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "timeout")
    assert (await http.post("/v1/completions", json=LONG, headers={"X-Request-Timeout": "x"})).status_code == 400

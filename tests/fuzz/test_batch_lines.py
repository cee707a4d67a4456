"""Lines of a batch: each has an answer, with its own id."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.batch.batch_server import BatchServer
from quire.frontend.http.server_config import ServerConfig
from tests.fuzz.examples import altered, fuzzed, mutated

BODY: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": -1, "stream": False}
LINE: dict[str, Any] = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": BODY}


def test_lines(checkpoint: Callable[..., Path]) -> None:
    """`max_tokens` is wrong, so that none reaches the engine, which never starts."""
    encoded = json.dumps(LINE).encode()
    engine = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), served_model_name="tiny")
    server = BatchServer(engine, ServerConfig())
    with asyncio.Runner() as runner:

        @fuzzed(40)
        @given(st.one_of(st.binary(max_size=40), mutated(encoded), altered(LINE).map(json.dumps).map(str.encode)))
        def run(line: bytes) -> None:
            answer = runner.run(server.answer(7, line))
            assert answer.line == 7
            if answer.error is not None:
                assert answer.response.status_code < 500 or "engine" in answer.error.message, (line, answer)

        run()

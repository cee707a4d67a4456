"""Two tensor-parallel ranks of a real model, one of which fails in the middle of a step: streams go on."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.servers import ServerProcess, program_with
from tests.test_pipeline import workers_of

pytestmark = pytest.mark.turns(4, among="whole systems")

ASKED: dict[str, Any] = {
    "model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 400, "temperature": 0.9, "seed": 4,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip


def test_streams_go_on_when_one_rank_runs_out_of_memory_or_is_stopped(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--served-model-name", "tiny", "-tp", "2",
        program=program_with("tests.executor.short_rank:create_worker"),
        env={"RAN_SHORT": str(tmp_path / "short"), "PYTHONPATH": str(Path(__file__).parents[1])},
    ).wait_until_ready()  # fmt: skip
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)
    try:
        disturbed = client.completions.create(**ASKED).choices[0].text
        assert (tmp_path / "short").exists()
        assert httpx.get(server.base_url + "/health").json()["engine"]["restarts"] == 1
        assert "Worker tp1 failed: OutOfMemoryError: Tried to allocate 2.00 GiB." in server.logs()
        assert client.completions.create(**ASKED).choices[0].text == disturbed
        text, victim = "", None
        for chunk in client.completions.create(stream=True, **ASKED):
            text += chunk.choices[0].text
            if victim is None and len(text) > 20:
                victim = workers_of(server)[1]
                victim.send_signal(signal.SIGSTOP)
        assert text == disturbed
        assert "Stopped by a signal (SIGSTOP): Worker tp1" in server.logs()
        assert "most recent call first" in server.logs()  # where the first rank waited
    finally:
        assert server.stop() == 0

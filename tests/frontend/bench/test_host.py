"""The host benchmark: every stage runs, and counts every token that was requested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import uvloop

from quire.core.errors import QuireError
from quire.frontend.bench.host.http_client import CompletionConnection
from quire.frontend.bench.host.null_engine import NullSetup
from quire.frontend.bench.host.steps import measure_steps
from tests.servers import ServerProcess


def test_every_stage_and_executor_is_measured(tmp_path: Path) -> None:
    out, mark = tmp_path / "figures.json", {"STARTED_BY": str(tmp_path)}  # which its processes inherit
    done = subprocess.run(
        [
            sys.executable, "-m", "quire", "bench", "host", "--num-streams", "3", "--seconds", "0.1", "--output-len",
            "7", "--num-steps", "3", "--output-json", str(out),
        ],
        capture_output=True, text=True, timeout=120, env=os.environ | mark,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    measured = [(row["executor"], row["stage"]) for row in figures["streams"]]
    assert measured == [(executor, stage) for executor in ("uni", "mp") for stage in ("engine", "text", "http")]
    for row in figures["streams"]:
        assert row["requests"] >= 3
        assert row["tokens"] == 7 * row["requests"]
        roles = {"frontend", "engine"} | ({"client"} if row["stage"] == "http" else set())
        assert set(row["cpu_us_per_token"]) - {"other"} == roles | ({"worker"} if row["executor"] == "mp" else set())
    assert [row["running"] for row in figures["steps"]] == [3]
    assert not [
        each for each in psutil.process_iter(["environ"]) if mark.items() <= (each.info["environ"] or {}).items()
    ]


def test_a_step_is_timed_with_all_requests_running() -> None:
    config, _ = NullSetup("uni", 8, 96).resolve()
    figures = measure_steps(config, 8, 10)
    assert figures["step_us"] == pytest.approx(figures["schedule_us"] + figures["update_us"])
    assert figures["us_per_request"] == pytest.approx(figures["step_us"] / 8)


def test_the_cheap_client_counts_and_complains(server: ServerProcess) -> None:
    async def count(**changes: object) -> int:
        connection = await CompletionConnection.open(server.port)
        body = {"prompt": [5, 6], "max_tokens": 9, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        try:
            return sum([await connection.complete(body | options | changes) for _ in range(2)])
        finally:
            connection.close()

    assert uvloop.run(count()) == 18
    with pytest.raises(QuireError, match="400"):
        uvloop.run(count(max_tokens=-1))
    with pytest.raises(QuireError, match="without usage"):
        uvloop.run(count(stream_options=None))

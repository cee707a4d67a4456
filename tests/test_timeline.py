"""`--profiler-config` makes a server that writes timelines; without it there are no such routes."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from tests.servers import ServerProcess

pytestmark = pytest.mark.turns(4, among="whole systems")


def spans_in(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.iterdir()
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def check_steps(folder: Path, num_steps: int) -> None:
    """Engine and worker share one clock, and the worker names its operations."""
    spans = spans_in(folder)
    names = {span["name"] for span in spans}
    assert names >= {
        "plan", "send", "wait", "update", "emit", "step", "inputs", "forward", "sample", "result", "attention",
        "rotate_and_store",
    }  # fmt: skip
    assert len([name for name in names if name.startswith("linear ")]) >= 4
    steps = sorted((span["ts"], span["ts"] + span["dur"]) for span in spans if span["name"] == "step")
    assert len(steps) == num_steps
    first, last = steps[0][0], steps[-1][1]
    assert any(first <= span["ts"] <= last for span in spans if span["name"] == "plan")


def test_a_server_writes_what_its_engine_and_worker_did(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--distributed-executor-backend", "mp",
        "--profiler-config", json.dumps({"profiler": "timeline", "torch_profiler_dir": str(traces)}),
    ).wait_until_ready()  # fmt: skip
    try:
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
            client.post("/start_profile").raise_for_status()
            client.post("/v1/completions", json=body).raise_for_status()
            client.post("/stop_profile").raise_for_status()
    finally:
        server.stop()
    check_steps(traces, 20)  # those of the second request


def test_servers_without_a_profiler_have_no_such_routes(base_url: str) -> None:
    assert httpx.post(f"{base_url}/start_profile").status_code == 404


def test_llm_records_a_worker_in_the_engine_too(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = {"profiler": "timeline", "torch_profiler_dir": str(tmp_path / "traces")}
    with LLM(str(checkpoint("llama")), profiler_config=config) as llm:
        llm.start_profile()
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        llm.stop_profile()
    check_steps(tmp_path / "traces", 20)


def test_a_profiler_needs_a_folder(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="torch_profiler_dir"):
        LLM(str(checkpoint("llama")), profiler_config={"profiler": "torch"})


def profile_in(path: Path) -> set[str]:
    """The names of all events in a file of torch's profiler."""
    read = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return {event["name"] for event in json.loads(read)["traceEvents"] if event.get("ph") == "X"}


def test_torchs_profiler_writes_the_operations_of_each_worker(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    server = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--tensor-parallel-size", "2",
        "--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)}),
    ).wait_until_ready()  # fmt: skip
    try:
        with httpx.Client(base_url=server.base_url, timeout=60) as client:
            body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
            for _ in range(2):  # decode steps are recorded by then
                client.post("/v1/completions", json=body).raise_for_status()
            client.post("/start_profile", json={"profile_prefix": "mine"}).raise_for_status()
            client.post("/v1/completions", json=body).raise_for_status()
            path = client.post("/stop_profile").raise_for_status().json()["path"]
            client.post("/v1/completions", json=body).raise_for_status()
            wrong = client.post("/start_profile", json={"profile_prefix": "../mine"})
    finally:
        server.stop()
    assert (wrong.status_code, "profile_prefix" in wrong.text) == (400, True)
    files = sorted(folder.glob("*.pt.trace.json.gz"))
    assert [file.name.split(".")[0] for file in files] == ["mine_tp0", "mine_tp1"]
    assert path == str(files[0])
    for file in files:
        names = profile_in(file)
        assert names >= {"inputs", "forward", "sample", "attention", "rotate_and_store"}
        assert len([name for name in names if name.startswith("linear ")]) >= 4
        assert any(name.startswith("aten::") for name in names)
    num_left_out = server.logs().count("the table of operations is left out")  # torch could not read a name
    assert len(list(folder.glob("profiler_out_mine_tp*.txt"))) + num_left_out == 2


def test_torchs_profiler_counts_steps(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = {
        "profiler": "torch", "torch_profiler_dir": str(tmp_path / "profiles"), "torch_profiler_use_gzip": False,
        "torch_profiler_with_stack": False, "delay_iterations": 2, "max_iterations": 3,
    }  # fmt: skip

    def num_steps(path: str | None) -> int:
        assert path is not None
        events = json.loads(Path(path).read_text())["traceEvents"]
        assert any(event["name"].startswith("linear ") for event in events)
        return len([event for event in events if event.get("cat") == "user_annotation" and event["name"] == "forward"])

    with LLM(str(checkpoint("llama")), profiler_config=config) as llm:
        sampling = SamplingParams(max_tokens=10, ignore_eos=True)
        counts = []
        for options in ({}, {"delay_iterations": 0}, {"delay_iterations": 0, "max_iterations": 0}):
            llm.start_profile(**options)
            llm.generate([[5, 6, 7]], sampling, use_tqdm=False)
            counts.append(num_steps(llm.stop_profile()))
        assert llm.stop_profile() is None  # nothing runs
    assert counts == [3, 3, 10]


def test_a_timeline_takes_no_options_of_torchs_profiler(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="torch_profiler_dir alone"):
        LLM(str(checkpoint("llama")), profiler_config={
            "profiler": "timeline", "torch_profiler_dir": "x", "max_iterations": 3,
        })  # fmt: skip

"""Captures of steps: what needs the host is found out before CUDA fails, and the step then runs without a graph."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from quire.ops.triton import graphs
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.graphs import GraphRecorder, UnrecordableError, _WithoutHost
from tests.executor.pretend_device import PretendDevice


def x() -> torch.Tensor:
    return torch.arange(4.0, device="cuda")


READING: dict[str, Callable[[], Any]] = {
    "item": lambda: x()[0].item(),
    "tolist": lambda: x().tolist(),
    "bool": lambda: bool(x()[0]),
    "int": lambda: int(x()[0]),
    "nonzero": lambda: x().nonzero(),
    "bincount": lambda: torch.bincount(x().long()),
    "mask": lambda: x()[x() > 1],
    "cpu": lambda: x().cpu(),
    "numpy": lambda: torch.from_numpy(np.arange(4)).to("cuda"),
    "to": lambda: torch.ones(3).to(torch.device("cuda")),
    "cuda": lambda: torch.ones(3).cuda(),
    "copy": lambda: x().copy_(torch.ones(4)),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda"),
}
HARMLESS: dict[str, Callable[[], Any]] = {
    "add": lambda: x() + 1,
    "index": lambda: x()[x().long()],
    "slice": lambda: x()[1:],
    "dtype": lambda: x().to(torch.bfloat16).float(),
    "same": lambda: x().to("cuda"),
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "copy": lambda: x().copy_(x() + 1),
    "length": lambda: len(x()) + x().shape[0],
    "where": lambda: torch.where(x() > 1, x(), 0),
}


@pytest.mark.parametrize("name", READING)
def test_operations_that_need_the_host_raise(name: str) -> None:
    with PretendDevice(), _WithoutHost(), pytest.raises(UnrecordableError, match="values of the"):
        READING[name]()


@pytest.mark.parametrize("name", HARMLESS)
def test_others_do_not(name: str) -> None:
    with PretendDevice(), _WithoutHost():
        HARMLESS[name]()


class Graph:
    """A graph of a device that is not there. Its capture fails in CUDA if `is_broken`."""

    is_broken = False
    calls: ClassVar[list[str]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads use the device as well"
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.calls.append("replay")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes = {
        "CUDAGraph": Graph, "Stream": lambda: stream, "current_stream": lambda: stream,
        "graph_pool_handle": lambda: (0, 1), "stream": lambda _: contextlib.nullcontext(), "current_device": lambda: 0,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "_borrowed", lambda result: result)
    monkeypatch.setattr(Graph, "calls", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: Graph.calls.append("drop"), raising=False)
    with PretendDevice():
        yield Graph.calls


def test_a_step_is_captured_and_then_replayed(calls: list[str]) -> None:
    result, recording = TritonBackend().record(lambda: x() + 1)
    assert result.tolist() == [1, 2, 3, 4]
    assert calls == ["begin", "end", "replay"], "a capture computes nothing"
    assert recording is not None
    recording.run()
    assert len(recording.run_timed()) == 1
    assert calls[3:] == ["replay", "replay"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_step_that_cannot_be_captured_runs_without_a_graph(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_broken: bool
) -> None:
    monkeypatch.setattr(Graph, "is_broken", is_broken)
    recorder = GraphRecorder()

    def run() -> torch.Tensor:
        if is_broken or not recorder.is_capturing:
            return x() + 1
        return x()[x().nonzero()]

    result, recording = recorder.record(run)
    assert recording is None
    assert result.tolist() == [1, 2, 3, 4]
    assert not recorder.is_capturing
    assert calls == (["begin", "end", "end", "drop"] if is_broken else ["begin", "end"])
    assert "without CUDA graphs" in caplog.text


def test_a_capture_that_lacks_memory_is_tried_again_once_torch_has_freed_its_own(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("free"))
    recorder = GraphRecorder()

    def run() -> torch.Tensor:
        if "free" not in calls:
            raise torch.OutOfMemoryError
        return x() + 1

    result, recording = recorder.record(run)
    assert recording is not None
    assert result.tolist() == [1, 2, 3, 4]
    assert calls == ["begin", "end", "free", "begin", "end", "replay"]

"""A real worker on an accelerator that is not there: padded decode steps, recorded or not, have the CPU's tokens.

Its operations are plain torch, because kernels take too long in Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.core.config.cache import CacheConfig
from quire.executor.worker import Worker
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.graphs import RULES
from tests.executor.pretend_device import PretendDevice
from tests.executor.step.test_model_runner import (
    NUM_BLOCKS,
    engine_config,
    generate,
    mixed_requests,
    start_worker,
    tokens_of,
)

torch.set_num_threads(1)


class Again:
    """Stands for a graph: calls the step's operations again, which write the same memory."""

    count = 0

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        self.result = run()

    def run(self) -> None:
        Again.count += 1
        self.result.copy_(self._run())


class PaddedBackend(EagerBackend[Any]):
    """Plain torch, with the rules of the backend for accelerators."""

    recording_rules = RULES

    def __init__(self) -> None:
        super().__init__(PlainLinear())

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        recording = Again(run)
        return recording.result, recording


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 36, 1 << 36))
    monkeypatch.setattr("quire.executor.worker.bind", lambda *_, **__: PaddedBackend())
    monkeypatch.setattr(Again, "count", 0)
    with PretendDevice() as device:
        yield device


def start(folder: Path, device: str) -> Worker:
    return start_worker(engine_config(folder, device=device, cache=CacheConfig(num_gpu_blocks_override=NUM_BLOCKS)))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return tokens_of(generate(start(folder, "cpu"), mixed_requests()))


@pytest.mark.parametrize("interval", [1, 20])
def test_tokens_are_those_of_the_cpu(
    folder: Path, expected: dict[str, list[int]], device: PretendDevice, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    assert RULES.interval == 20
    monkeypatch.setattr(PaddedBackend, "recording_rules", RULES._replace(interval=interval))
    worker = start(folder, "cuda")
    for options in ({"depth": 2}, {"max_num_batched_tokens": 24, "depth": 1}):
        assert tokens_of(generate(worker, mixed_requests(), **options)) == expected
    assert Again.count > 10

"""No kernel is compiled while requests run: steps ask for variants of the lists alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.ops.cache_rows import LARGEST_CODE
from quire.ops.triton import launch
from quire.ops.triton.binaries import Binary, store
from quire.ops.triton.driver import Driver
from quire.ops.triton.jobs import Job
from quire.ops.triton.kernel_function import KernelFunction
from quire.ops.triton.launcher import Launcher
from quire.ops.triton.variants import is_listed
from tests.ops.triton.dense_steps import SHAPES, Steps
from tests.ops.triton.fake_driver import FakeLibrary


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Forms that were asked for and that no list has."""
    unlisted: set[str] = set()

    def pretend(kernel: KernelFunction, job: Job, folder: Path) -> Binary:
        if not is_listed(kernel, job.specialization):
            unlisted.add(f"{kernel.name}{job.specialization}")
        binary = Binary(job.key, kernel.name, "", job.arch, "3", kernel.name, 0, 4, 0, 0, 1, 0, False)
        store(folder, binary, b"\x7fELF")
        return binary

    launcher = Launcher(Driver(NoArguments()), "sm_90", [tmp_path], lambda: (0, 0), pretend)
    monkeypatch.setattr(launch, "launcher_of_process", lambda: launcher)
    yield unlisted
    assert launcher.num_compiled > 10  # the kernels were launched by it


class NoArguments(FakeLibrary):
    """Does not read the arguments."""

    def __init__(self) -> None:
        super().__init__({})

    def _launch(self, *_: Any) -> int:
        return 0


def test_a_thousand_random_decode_steps_ask_for_listed_variants_alone(asked: set[str]) -> None:
    random = np.random.default_rng(0)
    for shape in SHAPES:
        steps = Steps(shape)
        for _ in range(1000 // len(SHAPES)):
            num_rows = int(random.choice([1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128]))
            lengths = random.integers(1, int(random.choice([20, 200, 3000])), num_rows)
            steps.run(lengths.tolist(), is_greedy=bool(random.integers(2)))
    assert asked == set()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float16, None), *((torch.bfloat16, each) for each in (None, *LARGEST_CODE))]
)
def test_types_of_models_and_caches(asked: set[str], dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    """In decode steps, and beside prompts. The kernels of float16 models with quantized caches are compiled later."""
    for shape in SHAPES[:2]:
        steps = Steps(shape, dtype, cache_dtype)
        for seq_lens, query_lens in (([20, 3000], [1, 1]), ([40], [40]), ([300, 90, 17], [200, 1, 3])):
            steps.run(seq_lens, query_lens=query_lens)
    assert asked == set()

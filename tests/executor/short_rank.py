"""A real worker whose second rank runs out of memory once, while the first one waits for it in the same sum."""

import os
from pathlib import Path

import torch

from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor.processes import worker_factory
from quire.executor.worker import Worker

NUM_SUMS = 300


def create_worker(config: EngineConfig, rank: Rank, init_method: str) -> Worker:
    worker = worker_factory.create_worker(config, rank, init_method)
    if rank.tensor == 1:
        _run_short(worker, Path(os.environ["RAN_SHORT"]))
    return worker


def _run_short(worker: Worker, sign: Path) -> None:
    """Fails one of the sums of the worker's group, unless the file says that another engine's has."""
    sum_up, sums = worker._group.all_reduce, iter(range(NUM_SUMS))

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        if next(sums, None) is None and not sign.exists():
            sign.touch()
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return sum_up(x)

    worker._group.all_reduce = all_reduce  # type: ignore[method-assign]

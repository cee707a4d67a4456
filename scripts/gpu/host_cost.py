"""The host's time for a decode step, by a backend that does nothing: a worker whose steps replay empty recordings."""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import quire.executor.worker
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.protocol import EngineRequest, SequenceStart
from quire.core.wire.rank import Rank
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.frontend.bench.host.null_engine import NullSetup
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.eager.sampling import EagerSampling
from quire.ops.triton.graphs import RULES

PROMPT_LEN = 32
WARMUP_STEPS = 8
"""Steps before those that are timed: the second of a shape is recorded."""


class Nothing:
    """A recording of no operation."""

    def run(self) -> None:
        pass


class NoSampling(EagerSampling):
    """Chooses token 1, always from the same memory."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        size = len(logits)
        if size not in self._tokens:
            self._tokens[size] = torch.ones(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool)
        return self._tokens[size]


class NoBackend(EagerBackend[Any]):
    """Plain torch with the rules of CUDA graphs; what is recorded does nothing."""

    recording_rules = RULES._replace(interval=1)

    def __init__(self) -> None:
        super().__init__(PlainLinear())
        self.sampling = NoSampling()

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Any]:
        return run(), Nothing()


class Figures(NamedTuple):
    """Medians of a decode step, in milliseconds."""

    rows: int
    schedule_ms: float
    launch_ms: float
    collect_ms: float
    update_ms: float

    @property
    def worker_ms(self) -> float:
        return self.launch_ms + self.collect_ms


def measure(num_rows: int, num_steps: int) -> Figures:
    """Runs decode steps of so many greedy requests."""
    num_tokens = PROMPT_LEN + WARMUP_STEPS + num_steps + 2
    config, _ = NullSetup(executor="uni", max_num_seqs=num_rows, max_model_len=num_tokens).resolve()
    worker = Worker(config, Rank(), ParallelGroup())
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    scheduler = Scheduler(
        config.limits, kv_groups=ready.kv_groups, num_pages=ready.num_pages, max_model_len=ready.max_model_len,
        eos_token_ids=(),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens - PROMPT_LEN, ignore_eos=True)
    for row in range(num_rows):
        prompt = [(row + place) % config.spec.vocab_size for place in range(PROMPT_LEN)]
        scheduler.add(EngineRequest([SequenceStart(str(row), row)], prompt, sampling))
    times = []
    while len(times) < WARMUP_STEPS + num_steps:
        began = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        step = worker.launch(plan)
        launched = time.perf_counter()
        result = worker.collect(step)
        collected = time.perf_counter()
        scheduler.update(result)
        ended = time.perf_counter()
        if plan.num_scheduled == [1] * num_rows:
            times.append((scheduled - began, launched - scheduled, collected - launched, ended - collected))
    medians = np.median(np.asarray(times[WARMUP_STEPS:]), axis=0) * 1e3
    return Figures(num_rows, *(float(each) for each in medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256], help="Requests of a step (default: 1 256).")
    parser.add_argument("--steps", type=int, default=300, help="Steps that are timed (default: %(default)s).")
    args = parser.parse_args()
    torch.set_num_threads(1)
    quire.executor.worker.bind = lambda *_, **__: NoBackend()  # type: ignore[assignment]
    print("rows   worker: launch + collect   scheduler: schedule + update   (ms a step, medians)")
    for rows in args.rows:
        figures = measure(rows, args.steps)
        print(
            f"{rows:4}   {figures.worker_ms:.3f} = {figures.launch_ms:.3f} + {figures.collect_ms:.3f}          "
            f"{figures.schedule_ms + figures.update_ms:.3f} = {figures.schedule_ms:.3f} + {figures.update_ms:.3f}"
        )


if __name__ == "__main__":
    main()

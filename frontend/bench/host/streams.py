"""Runs many streams of requests against a stage, and measures tokens per wall time and processor time."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from quire.frontend.bench.host.cpu_time import CpuClock
from quire.frontend.bench.host.paths import Complete, HostPath

WARMUP_SECONDS = 0.2
PROMPTS_AT_ONCE = 1024


class Workload(Struct, frozen=True):
    """Requests of equal lengths, in tokens. Each stream sends one request after another for `seconds`."""

    input_len: int
    output_len: int
    seconds: float
    vocab_size: int

    def prompts(self) -> Iterator[list[int]]:
        """Endless prompts of random ids, all different, so that the prefix cache has none of them."""
        generator = np.random.default_rng(0)
        while True:
            yield from generator.integers(0, self.vocab_size, (PROMPTS_AT_ONCE, self.input_len)).tolist()


async def measure(stage: HostPath, num_streams: int, workload: Workload) -> dict[str, Any]:
    """Measures rates per second, and microseconds per token: wall time, and each role's processor time."""
    streams = [await stage.open_stream() for _ in range(num_streams)]
    prompts = workload.prompts()
    await _run(streams, prompts, workload.output_len, WARMUP_SECONDS)
    clock = CpuClock(stage.own_role)
    before, started = clock.read(), time.perf_counter()
    lengths = await _run(streams, prompts, workload.output_len, workload.seconds)
    seconds = time.perf_counter() - started
    after = clock.read()
    num_tokens = sum(lengths)
    cpu = {role: (after[role] - before[role]) * 1e6 / num_tokens for role in after}
    return {
        "streams": num_streams,
        "requests": len(lengths),
        "tokens": num_tokens,
        "seconds": seconds,
        "requests_per_second": len(lengths) / seconds,
        "tokens_per_second": num_tokens / seconds,
        "wall_us_per_token": seconds * 1e6 / num_tokens,
        "cpu_us_per_token": cpu,
    }


async def _run(streams: list[Complete], prompts: Iterator[list[int]], output_len: int, seconds: float) -> list[int]:
    """Runs all streams for `seconds`; each sends at least one request. Returns the lengths of all outputs."""
    deadline = time.perf_counter() + seconds
    lengths: list[int] = []

    async def one(complete: Complete) -> None:
        while True:
            lengths.append(await complete(next(prompts), output_len))
            if time.perf_counter() >= deadline:
                return

    await asyncio.gather(*map(one, streams))
    return lengths

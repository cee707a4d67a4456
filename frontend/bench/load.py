"""A load generator: sends requests to a server as they are due, and gathers their timings."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import httpx
import numpy as np

from quire.frontend.bench.datasets.request import BenchRequest
from quire.frontend.bench.figures import RequestTiming


class Target(Protocol):
    """A server, and the way to ask it."""

    @property
    def headers(self) -> dict[str, str]: ...

    async def time(self, client: httpx.AsyncClient, request: BenchRequest) -> RequestTiming:
        """Sends a request, and returns its timing."""


async def run_load(
    requests: list[BenchRequest],
    target: Target,
    *,
    request_rate: float,
    burstiness: float,
    max_concurrency: int | None,
    seed: int,
    on_done: Callable[[], None],
) -> tuple[list[RequestTiming], float]:
    """Sends all requests and waits for all answers. Returns the timings in order, and the seconds from start to end.

    Args:
        request_rate: arrivals per second; infinity sends all at once (within `max_concurrency`).
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process, less is burstier.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency or 256)
    gate = asyncio.Semaphore(max_concurrency or len(requests))
    tasks = []

    async def one(client: httpx.AsyncClient, request: BenchRequest) -> RequestTiming:
        async with gate:
            timing = await target.time(client, request)
        on_done()
        return timing

    async with httpx.AsyncClient(timeout=None, limits=limits, headers=target.headers) as client:
        started = time.perf_counter()
        async for request in _arrivals(requests, request_rate, burstiness, seed):
            tasks.append(asyncio.create_task(one(client, request)))
        timings = await asyncio.gather(*tasks)
        return timings, time.perf_counter() - started


async def _arrivals(
    requests: list[BenchRequest], rate: float, burstiness: float, seed: int
) -> AsyncIterator[BenchRequest]:
    generator = np.random.default_rng(seed)
    due = time.perf_counter()
    for request in requests:
        yield request
        if np.isfinite(rate):
            due += generator.gamma(burstiness, 1 / (rate * burstiness))
            await asyncio.sleep(due - time.perf_counter())

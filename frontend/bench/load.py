"""A load generator: sends requests to a server as they are due, and gathers their timings."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol, Self

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
    gate = asyncio.Semaphore(max_concurrency or len(requests))
    tasks = []

    async def one(clients: _Clients, request: BenchRequest) -> RequestTiming:
        async with gate:
            client = await clients.take()
            timing = await target.time(client, request)
            clients.give_back(client)
        on_done()
        return timing

    async with _Clients(target.headers) as clients:
        started = time.perf_counter()
        async for request in _arrivals(requests, request_rate, burstiness, seed):
            tasks.append(asyncio.create_task(one(clients, request)))
        timings = await asyncio.gather(*tasks)
        return timings, time.perf_counter() - started


class _Clients:
    """HTTP clients, one for each request in flight: a client of many connections searches them all for each request."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._idle: list[httpx.AsyncClient] = []
        self._open = AsyncExitStack()
        self._trust = ssl.create_default_context()  # made once: it reads the authorities' file

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def take(self) -> httpx.AsyncClient:
        """Returns an idle client, the one used last, or else a new one."""
        if self._idle:
            return self._idle.pop()
        client = httpx.AsyncClient(timeout=None, headers=self._headers, verify=self._trust)
        return await self._open.enter_async_context(client)

    def give_back(self, client: httpx.AsyncClient) -> None:
        self._idle.append(client)


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

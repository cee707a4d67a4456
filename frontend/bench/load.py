"""A streaming load generator for any OpenAI-compatible server."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec
import numpy as np

from quire.frontend.bench.datasets.request import BenchRequest
from quire.frontend.bench.figures import RequestTiming


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class Target(msgspec.Struct, frozen=True):
    """The server's URL and headers, and the fields of every request's body besides prompt and length."""

    url: str
    chat: bool
    headers: dict[str, str]
    body: dict

    def body_of(self, request: BenchRequest) -> bytes:
        """The JSON body of one request."""
        body = self.body | {"max_tokens": request.output_len, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt or request.prompt_token_ids
        return msgspec.json.encode(body)


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
            timing = await _time_request(client, target, request)
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


async def _time_request(client: httpx.AsyncClient, target: Target, request: BenchRequest) -> RequestTiming:
    timing = RequestTiming(prompt_tokens=len(request.prompt_token_ids))
    started = last = time.perf_counter()
    try:
        async with client.stream("POST", target.url, content=target.body_of(request)) as response:
            if response.status_code != 200:
                timing.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}"
                return timing
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                chunk = _chunk_decoder.decode(line[5:])
                if chunk.usage is not None:
                    timing.output_tokens = chunk.usage.completion_tokens
                if not any(choice.text or (choice.delta and choice.delta.content) for choice in chunk.choices):
                    continue
                now = time.perf_counter()
                if timing.ttft == 0.0:
                    timing.ttft = now - started
                else:
                    timing.gaps.append(now - last)
                last = now
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.latency = last - started
    if not timing.error and timing.output_tokens == 0:
        timing.error = "the stream ended without usage or tokens"
    return timing

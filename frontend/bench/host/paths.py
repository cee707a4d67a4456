"""The stages that are measured: the engine alone, `AsyncLLM`, and the HTTP server."""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import httpx
import msgspec

from quire.core.errors import QuireError
from quire.core.wire.protocol import EngineRequest, RequestDelta, SequenceStart
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.bench.host.http_client import CompletionConnection
from quire.frontend.bench.host.null_engine import NullSetup

START_SECONDS = 120.0

Complete = Callable[[list[int], int], Awaitable[int]]
"""(prompt ids, requested output tokens) -> received output tokens."""


class HostPath(Protocol):
    """A stage that completes prompts. To be used from one event loop."""

    own_role: str  # the role of this process while the stage is measured

    async def start(self) -> None: ...

    async def open_stream(self) -> Complete:
        """Opens a stream: returns the function that completes its requests, one after another."""

    async def close(self) -> None: ...


class EnginePath:
    """The engine: scheduler, ring or thread, and ZeroMQ. Sends token ids through an `EngineClient`."""

    own_role = "frontend"

    def __init__(self, setup: NullSetup) -> None:
        self._client = setup.client()
        self._ids = itertools.count()

    async def start(self) -> None:
        await self._client.start()

    async def open_stream(self) -> Complete:
        return self._complete

    async def _complete(self, prompt: list[int], output_len: int) -> int:
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        count = 0

        def on_delta(delta: RequestDelta) -> None:
            nonlocal count
            count += len(delta.token_ids)
            if delta.finish_reason is not None:
                finished.set_result(None)

        sampling = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)
        start = SequenceStart(f"bench-{next(self._ids)}", seed=0)
        self._client.submit(EngineRequest([start], prompt, sampling), [on_delta])
        await finished
        return count

    async def close(self) -> None:
        await self._client.close()


class TextPath:
    """`AsyncLLM`: the engine with validation, detokenizer and metrics; one output per token, as a server takes them."""

    own_role = "frontend"

    def __init__(self, setup: NullSetup) -> None:
        self._llm = setup.llm()
        self._ids = itertools.count()

    async def start(self) -> None:
        await self._llm.start()

    async def open_stream(self) -> Complete:
        return self._complete

    async def _complete(self, prompt: list[int], output_len: int) -> int:
        sampling = SamplingParams(max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        count = 0
        async for output in self._llm.generate(prompt, sampling, f"bench-{next(self._ids)}"):
            count += sum(len(completion.token_ids) for completion in output.outputs)
        return count

    async def close(self) -> None:
        await self._llm.aclose()


class HttpPath:
    """A server process; this process requests streamed completions over keep-alive connections."""

    own_role = "client"

    def __init__(self, setup: NullSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[CompletionConnection] = []
        self._port = 0
        self._model = ""

    async def start(self) -> None:
        self._process = self._launch()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}") as client:
            deadline = time.monotonic() + START_SECONDS
            while not await self._is_ready(client):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise QuireError("the benchmark's server did not start; run `quire serve` to see why")
                await asyncio.sleep(0.05)
            self._model = (await client.get("/v1/models")).json()["data"][0]["id"]

    def _launch(self) -> subprocess.Popen[bytes]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        setup = msgspec.json.encode(self._setup).decode()
        return subprocess.Popen(
            [sys.executable, "-m", "quire.frontend.bench.host.null_server", setup, str(self._port)],
            stderr=subprocess.DEVNULL,  # drops log lines; `start` notices a failure when the process ends
        )

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await client.get("/health")).status_code == 200
        return False

    async def open_stream(self) -> Complete:
        connection = await CompletionConnection.open(self._port)
        self._connections.append(connection)

        async def complete(prompt: list[int], output_len: int) -> int:
            return await connection.complete(
                {
                    "model": self._model,
                    "prompt": prompt,
                    "max_tokens": output_len,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )

        return complete

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)


PATHS: dict[str, Callable[[NullSetup], HostPath]] = {"engine": EnginePath, "text": TextPath, "http": HttpPath}

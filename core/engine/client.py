"""A frontend's handle on the engine: submits requests, hands back deltas, and survives the engine's death.

The client keeps, for each unfinished request, the tokens delivered so far. When the engine dies or goes silent, it is
started again and every unfinished request is submitted anew with those tokens; sampling is a function of (seed,
position), so a stream goes on as if nothing had happened. A request that was present at two crashes fails instead.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from quire.core import envs
from quire.core.engine.channel import Channel, CurveKeys, connect_dealer
from quire.core.errors import EngineDeadError, EngineError, ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire import protocol
from quire.core.wire.protocol import EngineReady, EngineRequest, RequestDelta, SchedulerStats

logger = get_logger(__name__)

MAX_CRASHES_PER_REQUEST = 2
MAX_FRUITLESS_RESTARTS = 3
CLOSE_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.05
"""How long after an engine's end its last message may still be on the way."""

OnDelta = Callable[[RequestDelta], None]


class EngineHandle(Protocol):
    """One running engine process."""

    address: str
    keys: CurveKeys | None
    pid: int

    async def wait(self) -> int:
        """The exit code, once the process has ended (negative: the signal that killed it)."""

    def kill(self) -> None:
        """Ends the process and its workers at once. Harmless when it has ended."""


class Launcher(Protocol):
    """Starts engine processes."""

    def launch(self) -> EngineHandle: ...

    def close(self) -> None:
        """Removes what the launcher made on disk."""


class _Tracked(Struct):
    """The truth about one unfinished request."""

    request: EngineRequest
    on_delta: OnDelta
    delivered: list[int]
    crashes: int = 0


class EngineClient:
    """Use from one event loop.

    Args:
        launcher: starts the engine, the first time and after a crash.
        on_stats: called with the scheduler's statistics of every step and heartbeat.
    """

    def __init__(self, launcher: Launcher, *, on_stats: Callable[[SchedulerStats], None] | None = None) -> None:
        self._process_id = os.getpid()
        self._launcher = launcher
        self._on_stats = on_stats or (lambda stats: None)
        self._encoder = protocol.encoder()
        self._decoder = msgspec.msgpack.Decoder(protocol.EngineOutput)
        self._tracked: dict[str, _Tracked] = {}
        self._handle: EngineHandle | None = None
        self._channel: Channel | None = None
        self._ready: EngineReady | None = None
        self._started: asyncio.Future[EngineReady] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._profiling: deque[asyncio.Future[protocol.Profiled]] = deque()  # in the order of their requests
        self._failure: protocol.EngineFailed | None = None
        self._dead: EngineDeadError | ModelLoadError | None = None
        self._heard_at = 0.0
        self._fruitless_restarts = 0
        self._closing = False
        self._silence_limit_seconds = envs.read_float("ENGINE_HEARTBEAT_TIMEOUT_S")

    async def start(self) -> EngineReady:
        """Starts the engine, once; later calls wait for the same start.

        Raises:
            ModelLoadError: the engine says that the checkpoint or the memory is at fault.
            EngineDeadError: the engine ended without saying why.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._started)

    @property
    def num_unfinished(self) -> int:
        return len(self._tracked)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the running engine; changes after a crash."""
        return self._handle.pid if self._handle is not None else None

    def submit(self, request: EngineRequest, on_delta: OnDelta) -> None:
        """Hands over a request. `on_delta` gets its deltas in order, on this loop; the last has a `finish_reason`.

        Raises:
            EngineDeadError: the engine is gone for good.
        """
        self.check_health()
        self._tracked[request.request_id] = _Tracked(request, on_delta, list(request.output_token_ids))
        if self._ready is not None:  # else the supervisor submits it when the engine is up
            self._send(request)

    def abort(self, request_ids: list[str]) -> None:
        """Forgets requests, here at once and in the engine within a step. Unknown ids are ignored."""
        known = [request_id for request_id in request_ids if self._tracked.pop(request_id, None) is not None]
        if known and self._ready is not None:
            self._send(protocol.AbortRequests(known))

    def reset_prefix_cache(self) -> None:
        """Drops cached pages that no request uses."""
        if self._ready is not None:
            self._send(protocol.ResetPrefixCache())

    async def profile(self, active: bool) -> str | None:
        """Starts or ends a recording of the engine's timeline; returns the path of the file at the end.

        Raises:
            EngineError: it cannot be written, or the engine went away; EngineDeadError if it is gone for good.
        """
        await self.start()
        self.check_health()
        answer: asyncio.Future[protocol.Profiled] = asyncio.get_running_loop().create_future()
        self._profiling.append(answer)
        self._send(protocol.Profile(active))
        done = await answer
        if done.error is not None:
            raise EngineError(done.error)
        return done.path

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone for good. An engine being restarted is healthy."""
        if self._dead is not None:
            raise EngineDeadError(f"The engine is gone: {self._dead} Restart the server.")

    async def close(self) -> None:
        """Stops the engine: politely when it is serving, by force while it loads or when it does not answer."""
        self._closing = True
        for request_id in list(self._tracked):
            self._fail(request_id, "The server shut down while the request ran.")
        if self._ready is not None:
            self._send(protocol.Shutdown())
            if self._supervisor is not None:
                await asyncio.wait([self._supervisor], timeout=CLOSE_SECONDS)
        self.close_nowait()

    def close_nowait(self) -> None:
        """Ends the engine by force, without waiting for anything; for interpreter exit and signals."""
        if os.getpid() != self._process_id:  # a fork inherits this object, and not the engine
            return
        self._closing = True
        self._dead = self._dead or EngineDeadError("it was shut down.")
        if self._handle is not None:
            self._handle.kill()
        self._launcher.close()

    # ------------------------------------------------------------------------------------------------- supervision

    async def _supervise(self) -> None:
        """Runs one engine after another until one fails for good."""
        assert self._started is not None
        while True:
            reason = await self._run_one_engine()
            if self._closing:
                return
            if self._failure is not None and self._failure.fatal:
                self._give_up(ModelLoadError(self._failure.message))
                return
            self._fruitless_restarts += 1
            if not self._started.done() or self._fruitless_restarts > MAX_FRUITLESS_RESTARTS:
                self._give_up(EngineDeadError(f"the engine {reason}."))
                return
            self._refuse_poison()
            logger.error("the engine %s; restarting it for %d unfinished requests", reason, len(self._tracked))

    async def _run_one_engine(self) -> str:
        """Launches an engine, waits for its end. Returns how it ended, in words."""
        self._failure = None
        self._heard_at = time.monotonic()
        self._handle = handle = self._launcher.launch()
        self._channel = channel = connect_dealer(handle.address, handle.keys, self._on_message)
        self._send(protocol.Hello())
        silence = asyncio.create_task(self._watch_silence(handle))
        try:
            code = await handle.wait()
            await asyncio.sleep(LAST_WORDS_SECONDS)
        finally:
            silence.cancel()
            self._ready = None
            while self._profiling:
                self._answer_profile(protocol.Profiled(error="The engine ended while it recorded a timeline."))
            channel.close()
        handle.kill()  # workers that outlived it
        if silence.done() and not silence.cancelled():
            return f"was silent for {self._silence_limit_seconds:.0f} s and was killed"
        if self._failure is not None:
            return f"failed: {self._failure.message}"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    async def _watch_silence(self, handle: EngineHandle) -> None:
        """Kills an engine whose event loop no longer turns."""
        while (silent := time.monotonic() - self._heard_at) < self._silence_limit_seconds:  # noqa: ASYNC110
            await asyncio.sleep(self._silence_limit_seconds - silent)
        handle.kill()

    def _refuse_poison(self) -> None:
        for request_id, tracked in list(self._tracked.items()):
            tracked.crashes += 1
            if tracked.crashes >= MAX_CRASHES_PER_REQUEST:
                self._fail(request_id, "The engine crashed twice while it held this request, so it is not tried again.")

    def _give_up(self, error: ModelLoadError | EngineDeadError) -> None:
        assert self._started is not None
        self._dead = error
        if not self._started.done():
            self._started.set_exception(error)
        for request_id in list(self._tracked):
            self._fail(request_id, str(error))

    def _fail(self, request_id: str, message: str) -> None:
        tracked = self._tracked.pop(request_id)
        failure = protocol.RequestFailure("internal", message)
        tracked.on_delta(RequestDelta(request_id, [], finish_reason=protocol.FinishReason.ERROR, failure=failure))

    # ---------------------------------------------------------------------------------------------------- messages

    def _send(self, message: protocol.EngineInput) -> None:
        assert self._channel is not None
        self._channel.send([self._encoder.encode(message)])

    def _on_message(self, frames: list[bytes]) -> None:
        self._heard_at = time.monotonic()
        message = self._decoder.decode(frames[0])
        match message:
            case protocol.StepOutputs():
                self._deliver(message.deltas)
                self._on_stats(message.stats)
            case protocol.Heartbeat():
                self._on_stats(message.stats)
            case EngineReady():
                self._on_ready(message)
            case protocol.Profiled():
                self._answer_profile(message)
            case protocol.EngineFailed():
                self._failure = message

    def _answer_profile(self, done: protocol.Profiled) -> None:
        waiter = self._profiling.popleft()
        if not waiter.done():  # else whoever asked is gone
            waiter.set_result(done)

    def _on_ready(self, ready: EngineReady) -> None:
        assert self._started is not None
        self._ready = ready
        if not self._started.done():
            self._started.set_result(ready)
        for tracked in self._tracked.values():
            self._send(msgspec.structs.replace(tracked.request, output_token_ids=tracked.delivered))

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        """Hands each delta to its request. The loop runs once per token."""
        find = self._tracked.get
        for delta in deltas:
            tracked = find(delta.request_id)
            if tracked is None:  # aborted while the delta was on its way
                continue
            self._fruitless_restarts = 0
            tracked.delivered += delta.token_ids
            if delta.finish_reason is not None:
                del self._tracked[delta.request_id]
            try:
                tracked.on_delta(delta)
            except Exception:  # one request's text must not stop the others' deltas
                logger.exception("request %s failed while its output was processed", delta.request_id)
                self.abort([delta.request_id])

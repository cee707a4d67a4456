"""A frontend's handle on the engine: submits requests, hands back deltas, and survives the engine's death.

The client keeps, for each unfinished sequence, the tokens delivered so far. When the engine dies or goes silent, its
supervisor starts another, and every unfinished sequence is submitted anew with those tokens; sampling is a function of
(seed, position), so a stream goes on as if nothing had happened. A sequence that two engines held as they crashed fails
instead.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from quire.core.engine.lent_grammars import LentGrammars
from quire.core.engine.pending_answers import PendingAnswers
from quire.core.engine.restarts import Restarts
from quire.core.engine.supervisor import EngineNews, EngineStatus, EngineSupervisor, Launcher
from quire.core.errors import EngineError, QuireError
from quire.core.logging import get_logger
from quire.core.wire import protocol
from quire.core.wire.protocol import (
    EngineReady,
    EngineRequest,
    FinishReason,
    RequestDelta,
    RequestFailure,
    SchedulerStats,
    SequenceStart,
)

logger = get_logger(__name__)

MAX_CRASHES_PER_REQUEST = 2

OnDelta = Callable[[RequestDelta], None]


class _Submitted(Struct):
    """A request with unfinished sequences."""

    request: EngineRequest
    num_unfinished: int


class _Tracked(Struct):
    """The truth about one unfinished sequence."""

    submitted: _Submitted
    start: SequenceStart
    on_delta: OnDelta
    delivered: list[int]
    crashes: int = 0


class EngineClient:
    """Use from one event loop.

    Args:
        launcher: starts the engine, the first time and after a crash.
        on_stats: called with the scheduler's statistics of every step and heartbeat.
        restarts: decides whether an engine that ended is followed by another; the usual rules when None.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        on_stats: Callable[[SchedulerStats], None] | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self._on_stats = on_stats or (lambda stats: None)
        self._tracked: dict[str, _Tracked] = {}
        self._grammars = LentGrammars()
        self._num_calls = 0
        self._calls: dict[int, asyncio.Future[list[bytes]]] = {}  # of the workers, by their number
        self._profiles: PendingAnswers[protocol.Profiled] = PendingAnswers()
        self._cache_resets: PendingAnswers[protocol.PrefixCacheReset] = PendingAnswers()
        self._supervisor = EngineSupervisor(launcher, self, restarts or Restarts())

    async def start(self) -> EngineReady:
        """Starts the engine, once; later calls wait for the same start.

        Raises:
            ConfigError: a setting, the checkpoint or the memory is at fault.
            EngineDeadError: the engine ended without saying why.
        """
        return await self._supervisor.start()

    @property
    def num_unfinished(self) -> int:
        """Sequences in flight."""
        return len(self._tracked)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the running engine; changes after a crash. None while none runs."""
        return self._supervisor.pid

    def submit(self, request: EngineRequest, on_deltas: Sequence[OnDelta]) -> None:
        """Hands over a request. `on_deltas` has a callback for each sequence, which gets the sequence's deltas in
        order, on this loop; the last delta has a `finish_reason`.

        Raises:
            EngineDeadError: the engine is gone for good.
        """
        self.check_health()
        submitted = _Submitted(request, len(request.sequences))
        for start, on_delta in zip(request.sequences, on_deltas, strict=True):
            self._tracked[start.request_id] = _Tracked(submitted, start, on_delta, list(start.output_token_ids))
        self._grammars.add_user(request)
        if self._supervisor.is_ready:  # else `on_ready` submits it
            self._supervisor.send(self._grammars.without_known(request))

    def abort(self, request_ids: list[str]) -> None:
        """Forgets sequences, here at once and in the engine within a step. Unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._tracked]
        if known and self._supervisor.is_ready:
            self._supervisor.send(protocol.AbortRequests(known))
        for request_id in known:
            self._forget(request_id)

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Drops cached pages that no request uses. Returns whether that was all of them.

        Args:
            preempt_running: take the pages of running requests too; they are computed again, and their streams go on.

        Raises:
            EngineDeadError: the engine is gone for good.
        """
        await self.start()
        self.check_health()
        if not self._supervisor.is_ready:
            return True  # the next engine's cache is empty
        answer = self._cache_resets.expect()
        self._supervisor.send(protocol.ResetPrefixCache(preempt_running))
        return (await answer).is_empty

    async def profile(self, active: bool) -> str | None:
        """Starts or ends a recording of the engine's timeline; returns the path of the file at the end.

        Raises:
            EngineError: the file cannot be written, or the engine went away; EngineDeadError if it is gone for good.
        """
        await self.start()
        self.check_health()
        if not self._supervisor.is_ready:
            raise EngineError("The engine is being restarted, and records no timeline; try again when it is up.")
        answer = self._profiles.expect()
        self._supervisor.send(protocol.Profile(active))
        done = await answer
        if done.error is not None:
            raise EngineError(done.error)
        return done.path

    async def call_workers(self, name: str, payload: bytes = b"") -> list[bytes]:
        """Has every worker do something between two steps, and returns the answers by rank; see `WorkerCall`.

        Raises:
            EngineError: a worker failed at it, or the engine went away; EngineDeadError if it is gone for good.
        """
        await self.start()
        self.check_health()
        if not self._supervisor.is_ready:
            raise EngineError("The engine is being restarted; call its workers again when it is up.")
        self._num_calls += 1
        call_id = self._num_calls
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._supervisor.send(protocol.CallWorkers(call_id, name, payload))
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone for good. An engine being restarted is healthy."""
        self._supervisor.check_alive()

    def status(self) -> EngineStatus:
        """The engine's state, and the time since its last message."""
        return self._supervisor.status()

    async def close(self) -> None:
        """Fails unfinished requests and stops the engine: politely when it is serving, by force otherwise."""
        self._fail(self._tracked, "The server shut down while the request ran.")
        await self._supervisor.close()

    def close_nowait(self) -> None:
        """Ends the engine by force, without waiting for anything; for interpreter exit and signals."""
        self._supervisor.close_nowait()

    # ------------------------------------------------------------------------------- what the supervisor asks and tells

    @property
    def has_work(self) -> bool:
        return bool(self._tracked)

    def on_ready(self) -> None:
        unfinished: defaultdict[int, list[_Tracked]] = defaultdict(list)  # by id() of the `_Submitted`
        for tracked in self._tracked.values():
            unfinished[id(tracked.submitted)].append(tracked)
        for sequences in unfinished.values():
            starts = [replace(each.start, output_token_ids=each.delivered) for each in sequences]
            request = replace(sequences[0].submitted.request, sequences=starts)
            self._supervisor.send(self._grammars.without_known(request))

    def on_message(self, message: EngineNews) -> None:
        match message:
            case protocol.StepOutputs():
                self._deliver(message.deltas)
                self._on_stats(message.stats)
            case protocol.Heartbeat():
                self._on_stats(message.stats)
            case protocol.Profiled():
                self._profiles.give(message)
            case protocol.PrefixCacheReset():
                self._cache_resets.give(message)
            case protocol.WorkersAnswered():
                self._answer_call(message)

    def on_crash(self) -> None:
        self._profiles.give_all(protocol.Profiled(error="The engine ended while it recorded a timeline."))
        self._cache_resets.give_all(protocol.PrefixCacheReset(is_empty=True))
        for call_id in self._calls:
            self._answer_call(
                protocol.WorkersAnswered(call_id, [], error="The engine ended before its workers answered.")
            )
        self._grammars.forget_sent()
        for tracked in self._tracked.values():
            tracked.crashes += 1
        poison = [key for key, tracked in self._tracked.items() if tracked.crashes >= MAX_CRASHES_PER_REQUEST]
        self._fail(poison, "The engine crashed twice while it held this request, so it is not tried again.")

    def on_dead(self, error: QuireError) -> None:
        self._fail(self._tracked, f"The engine is gone: {error}")

    # ---------------------------------------------------------------------------------------------------- the requests

    def _answer_call(self, answer: protocol.WorkersAnswered) -> None:
        waiter = self._calls.get(answer.call_id)
        if waiter is None or waiter.done():  # the caller is gone
            return
        if answer.error is None:
            waiter.set_result(answer.results)
        else:
            waiter.set_exception(EngineError(answer.error))

    def _fail(self, request_ids: Iterable[str], message: str) -> None:
        failure = RequestFailure("internal", message)
        error = FinishReason.ERROR
        self._deliver([RequestDelta(each, [], finish_reason=error, failure=failure) for each in request_ids])

    def _forget(self, request_id: str) -> None:
        submitted = self._tracked.pop(request_id).submitted
        submitted.num_unfinished -= 1
        if not submitted.num_unfinished:
            unused = self._grammars.remove_user(submitted.request)
            if unused is not None and self._supervisor.is_ready:
                self._supervisor.send(protocol.DropGrammars([unused]))

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        """Hands each delta to its sequence: the only place where sequences end. The loop runs once per token.

        A callback may abort any sequence, those of later deltas included: when a request of n sequences fails, the
        callback of the first aborts the others.
        """
        find = self._tracked.get
        for delta in deltas:
            tracked = find(delta.request_id)
            if tracked is None:  # aborted while the delta was on its way
                continue
            tracked.delivered += delta.token_ids
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
            try:
                tracked.on_delta(delta)
            except Exception:  # one request's text must not stop the others' deltas
                logger.exception("request %s failed while its output was processed", delta.request_id)
                self.abort([delta.request_id])

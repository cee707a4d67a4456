"""The requests that a frontend has sent to one engine, and the answers that the engine owes.

The link counts the sequences that are placed on the engine, and sends each grammar once. Its user holds the requests,
and chooses an engine for each.
"""

import asyncio
from pathlib import Path
from typing import Protocol

from quire.core.engine.engine_clock import EngineClock
from quire.core.engine.engine_handle import EngineHandle
from quire.core.engine.engine_life import EngineMessage
from quire.core.engine.launcher import Launcher
from quire.core.engine.pending_answers import PendingAnswers
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.engine.sent_grammars import SentGrammars
from quire.core.errors import EngineError, QuireError
from quire.core.routing.engine_load import EngineLoad
from quire.core.wire import protocol
from quire.core.wire.protocol import EngineReady, EngineRequest, RequestDelta, SchedulerStats


class LinkUser(Protocol):
    """The owner of the requests that the engine runs."""

    def on_ready(self, link: "EngineLink", ready: EngineReady) -> None:
        """Handles an engine that is ready, and holds no request yet."""

    def on_deltas(self, deltas: list[RequestDelta]) -> None:
        """Handles the deltas of a step."""

    def on_stats(self, link: "EngineLink", stats: SchedulerStats) -> None:
        """Handles the engine's statistics."""

    def on_crash(self, link: "EngineLink", end: QuireError) -> None:
        """Handles the end of an engine that was ready. Its requests are lost."""

    def on_dead(self, link: "EngineLink", error: QuireError) -> None:
        """Handles the end of the last engine: no other follows."""


class EngineLink:
    """A frontend's requests on one engine after another with the same number. Use from one event loop.

    Args:
        number: the engine's number among the frontend's engines, from 0.

    Attributes:
        engine: starts, restarts and ends the engine.
        load: how busy the engine is.
        holds_requests: whether an engine may hold requests that were sent to it: from its readiness to its end.
    """

    def __init__(self, number: int, launcher: Launcher, user: LinkUser, restarts: RestartPolicy) -> None:
        self.number = number
        self.engine = EngineHandle(number, launcher, self, restarts)
        self.load = EngineLoad()
        self.holds_requests = False
        self._user = user
        self._grammars = SentGrammars()
        self._clock = EngineClock()  # of an engine on another host
        self._num_calls = 0
        self._calls: dict[int, asyncio.Future[list[bytes]]] = {}  # of the workers, by their number
        self._profiles: PendingAnswers[protocol.Profiled] = PendingAnswers()
        self._cache_resets: PendingAnswers[protocol.PrefixCacheReset] = PendingAnswers()

    @property
    def _is_elsewhere(self) -> bool:
        """True if the running engine is on another host."""
        return self.engine.pid is None

    # -------------------------------------------------------------------------------------------------------- requests

    def place(self, request: EngineRequest) -> None:
        """Counts the sequences of a request as the engine's. `remove` takes them out, all at once or one by one."""
        self.load.add(len(request.sequences))
        self._grammars.add_user(request)

    def send(self, request: EngineRequest) -> None:
        """Sends a request that was placed here to the engine, which must be ready."""
        self.load.send(len(request.sequences), request.num_new_tokens)
        if self._is_elsewhere and (path := self._grammars.unknown_file(request)) is not None:
            self.engine.send(protocol.LentFile(path, Path(path).read_bytes()))
        self.engine.send(self._grammars.without_known(request))

    def remove(self, request: EngineRequest, num_sequences: int, *, is_last: bool) -> None:
        """Takes out sequences that have ended or move to another engine.

        Args:
            is_last: no sequence of the request is left here.
        """
        self.load.remove(num_sequences)
        if is_last and (unused := self._grammars.remove_user(request)) is not None and self.engine.is_ready:
            self.engine.send(protocol.DropGrammars([unused]))

    def abort(self, request_ids: list[str]) -> None:
        """Makes the engine forget sequences."""
        if self.engine.is_ready:
            self.engine.send(protocol.AbortRequests(request_ids))

    def abort_replies(self, reply_ids: list[str]) -> None:
        """Makes the engine end requests of any frontend."""
        if self.engine.is_ready:
            self.engine.send(protocol.AbortReplies(reply_ids))

    # ------------------------------------------------------------------------------------------------------- questions

    async def reset_prefix_cache(self, *, preempt_running: bool) -> bool:
        self.engine.check_alive()
        if not self.engine.is_ready:
            return True  # the next engine's cache is empty
        answer = self._cache_resets.expect()
        self.engine.send(protocol.ResetPrefixCache(preempt_running))
        return (await answer).is_empty

    async def profile(self, active: bool) -> str | None:
        self.engine.check_alive()
        if not self.engine.is_ready:
            raise EngineError("The engine is being restarted, and records no timeline; try again when it is up.")
        answer = self._profiles.expect()
        self.engine.send(protocol.Profile(active))
        done = await answer
        if done.error is not None:
            raise EngineError(done.error)
        return done.path

    async def call_workers(self, name: str, payload: bytes) -> list[bytes]:
        self.engine.check_alive()
        if not self.engine.is_ready:
            raise EngineError("The engine is being restarted; call its workers again when it is up.")
        self._num_calls += 1
        call_id = self._num_calls
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.engine.send(protocol.CallWorkers(call_id, name, payload))
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    # --------------------------------------------------------------------------------------- callbacks of the engine

    def has_work(self, engine: EngineHandle) -> bool:
        return self.load.num_own > 0

    def on_ready(self, engine: EngineHandle, ready: EngineReady) -> None:
        self.holds_requests = True
        self._user.on_ready(self, ready)

    def on_message(self, engine: EngineHandle, message: EngineMessage) -> None:
        match message:
            case protocol.StepOutputs():
                if self._is_elsewhere:
                    self._clock.hear(message.timestamp)
                    self._clock.translate(message.deltas)
                self._user.on_deltas(message.deltas)
                self._report(message.stats)
            case protocol.Heartbeat():
                self._report(message.stats)
            case protocol.Profiled():
                self._profiles.give(message)
            case protocol.PrefixCacheReset():
                self._cache_resets.give(message)
            case protocol.WorkersAnswered():
                self._answer_call(message)

    def on_crash(self, engine: EngineHandle, end: QuireError) -> None:
        self.holds_requests = False
        self._clock = EngineClock()  # the next engine's host may have been started anew
        self.load.forget()
        self._profiles.give_all(protocol.Profiled(error="The engine ended while it recorded a timeline."))
        self._cache_resets.give_all(protocol.PrefixCacheReset(is_empty=True))
        for call_id in self._calls:
            self._answer_call(
                protocol.WorkersAnswered(call_id, [], error="The engine ended before its workers answered.")
            )
        self._grammars.forget_sent()
        self._user.on_crash(self, end)

    def on_dead(self, engine: EngineHandle, error: QuireError) -> None:
        self._user.on_dead(self, error)

    def _report(self, stats: SchedulerStats) -> None:
        self.load.report(stats)
        self._user.on_stats(self, stats)

    def _answer_call(self, answer: protocol.WorkersAnswered) -> None:
        waiter = self._calls.get(answer.call_id)
        if waiter is None or waiter.done():  # the caller is gone
            return
        if answer.error is None:
            waiter.set_result(answer.results)
        else:
            waiter.set_exception(EngineError(answer.error))

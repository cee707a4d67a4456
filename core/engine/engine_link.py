"""The requests that a frontend has sent to one engine, and the answers that the engine owes.

The link counts the sequences that are placed on the engine, and sends each grammar once. The client has the requests,
and chooses an engine for each.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.core.engine.engine_clock import EngineClock
from quire.core.engine.engine_handle import EngineHandle
from quire.core.engine.pending_answers import PendingAnswers
from quire.core.engine.sent_grammars import SentGrammars
from quire.core.errors import EngineError, ParameterError, UnavailableError
from quire.core.routing.engine_load import EngineLoad
from quire.core.wire import protocol
from quire.core.wire.adapters import Adapter
from quire.core.wire.protocol import EngineRequest
from quire.core.wire.row_outputs import RequestFailure


class EngineLink:
    """A frontend's requests on one engine after another with the same number. Use from one event loop.

    Attributes:
        number: the engine's, from 0.
        load: how busy the engine is.
        holds_requests: whether an engine may hold requests that were sent to it: from its readiness to its end.
    """

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.number = engine.number
        self.load = EngineLoad()
        self.holds_requests = False
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

    def abort_replies(self, reply_ids: list[str], tenant: str) -> None:
        """Makes the engine end a tenant's requests of any frontend."""
        if self.engine.is_ready:
            self.engine.send(protocol.AbortReplies(reply_ids, tenant))

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
        return await self._ask(lambda call_id: protocol.CallWorkers(call_id, name, payload))

    async def prepare_adapter(self, adapter: Adapter) -> None:
        self.engine.check_alive()
        if not self.engine.is_ready:
            return  # the next engine loads it with the first request
        answers = await self._ask(lambda call_id: protocol.PrepareAdapter(call_id, adapter))
        if not answers:
            return
        failure = msgspec.msgpack.decode(answers[0], type=RequestFailure)
        if failure.kind == "unavailable":
            raise UnavailableError(failure.message, retry_after_seconds=failure.retry_after_seconds)
        raise ParameterError(failure.message, param="lora_path")

    async def _ask(self, question: Callable[[int], protocol.EngineInput]) -> list[bytes]:
        """Sends a numbered question, and returns the answer. Raises EngineError after a failure."""
        self._num_calls += 1
        call_id = self._num_calls
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.engine.send(question(call_id))
        try:
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    def on_answer(self, answer: protocol.Profiled | protocol.PrefixCacheReset | protocol.WorkersAnswered) -> None:
        """Handles the engine's answer to a question."""
        match answer:
            case protocol.Profiled():
                self._profiles.give(answer)
            case protocol.PrefixCacheReset():
                self._cache_resets.give(answer)
            case protocol.WorkersAnswered():
                self._answer_call(answer)

    def _answer_call(self, answer: protocol.WorkersAnswered) -> None:
        waiter = self._calls.get(answer.call_id)
        if waiter is None or waiter.done():  # the caller is gone
            return
        if answer.error is None:
            waiter.set_result(answer.results)
        else:
            waiter.set_exception(EngineError(answer.error))

    # --------------------------------------------------------------------------------------------- one engine's life

    def translate_times(self, outputs: protocol.StepOutputs) -> None:
        """Translates an engine's times to this host's clock."""
        if self._is_elsewhere:
            self._clock.hear(outputs.timestamp)
            self._clock.translate(outputs.deltas)

    def on_crash(self) -> None:
        """Handles the engine's end: the next one knows nothing that this one was sent."""
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

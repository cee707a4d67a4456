"""Calls that were sent to workers and not yet answered by all of them."""

import asyncio

import msgspec

from quire.core.errors import EngineError, WorkerCallError
from quire.core.wire.protocol import WorkerAnswer, WorkerCall


class PendingCalls:
    """Numbers calls, and collects the answers of all ranks. Use it from one event loop.

    Args:
        num_ranks: workers that answer each call.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_calls = 0
        self._waiting: dict[int, tuple[asyncio.Future[list[bytes]], list[WorkerAnswer]]] = {}
        self._failure: EngineError | None = None

    def open(self, name: str, payload: bytes) -> tuple[WorkerCall, "asyncio.Future[list[bytes]]"]:
        """Returns a call to send, and the future of its results by rank. Raises EngineError after `fail`."""
        if self._failure is not None:
            raise self._failure
        self._num_calls += 1
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[self._num_calls] = future, []
        return WorkerCall(self._num_calls, name, payload), future

    def add(self, answer: WorkerAnswer) -> None:
        """Adds one rank's answer; the last one completes the call. After `fail`, answers are ignored."""
        if self._failure is not None:
            return
        future, answers = self._waiting[answer.call_id]
        answers.append(answer)
        if len(answers) < self._num_ranks:
            return
        del self._waiting[answer.call_id]
        if future.done():  # the caller is gone
            return
        answers.sort(key=lambda each: msgspec.structs.astuple(each.rank))
        errors = [f"Worker {each.rank}: {each.error}" for each in answers if each.error is not None]
        if errors:
            future.set_exception(WorkerCallError(errors[0]))
        else:
            future.set_result([each.result for each in answers])

    def fail(self, error: EngineError) -> None:
        """Fails all calls, and those to come. The first error stays."""
        self._failure = self._failure or error
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(error)

"""The steps that an executor has been given and has not answered: one future each, in plan order."""

import asyncio
from collections import deque

from quire.core.errors import EngineError
from quire.core.wire.protocol import StepResult


class PendingSteps:
    """Belongs to one event loop. After `fail`, every later step fails the same way."""

    def __init__(self) -> None:
        self._futures: deque[asyncio.Future[StepResult]] = deque()
        self._failure: EngineError | None = None

    def add(self) -> asyncio.Future[StepResult]:
        """The future of a new step; already failed when the executor has."""
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        if self._failure is None:
            self._futures.append(future)
        else:
            _set_exception(future, self._failure)
        return future

    def resolve(self, result: StepResult) -> None:
        """Answers the oldest step. Its waiter may have given up: the order stays the same."""
        if self._failure is not None:  # a last result that crossed the failure's path
            return
        future = self._futures.popleft()
        if not future.done():
            future.set_result(result)

    def fail(self, error: EngineError) -> None:
        """Fails all steps, present and future. The first error stays."""
        if self._failure is not None:
            return
        self._failure = error
        while self._futures:
            future = self._futures.popleft()
            if not future.done():
                _set_exception(future, error)


def _set_exception(future: asyncio.Future[StepResult], error: EngineError) -> None:
    future.set_exception(error)
    future.exception()  # marks it as seen: one failure must not be logged once for each step in flight

"""Results that the workers have sent and the engine has not taken yet, oldest first, and the failure that ends them."""

import asyncio
from collections.abc import Callable

from quire.core.errors import EngineError
from quire.core.wire.protocol import StepResult


class ResultInbox:
    """A queue of results, for one event loop."""

    def __init__(self) -> None:
        self._results: asyncio.Queue[StepResult | None] = asyncio.Queue()
        self._failure: EngineError | None = None
        self._on_failure: Callable[[], None] = lambda: None

    def put(self, result: StepResult) -> None:
        """Adds a result, unless the inbox has failed."""
        if self._failure is None:
            self._results.put_nowait(result)

    def fail(self, error: EngineError) -> None:
        """Ends the results with `error`; later errors are ignored."""
        if self._failure is None:
            self._failure = error
            self._results.put_nowait(None)
            self._on_failure()

    def when_failed(self, call: Callable[[], None]) -> None:
        self._on_failure = call
        if self._failure is not None:
            call()

    async def get(self) -> StepResult:
        """Returns the oldest result, once there is one. Raises the failure when all results before it are taken."""
        result = await self._results.get()
        if result is not None:
            return result
        assert self._failure is not None
        self._results.put_nowait(None)  # for the next caller
        raise self._failure

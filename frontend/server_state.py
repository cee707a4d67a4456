"""What the server is doing now: whether the model is loaded, how many requests run, and whether it is stopping."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

from quire.frontend.errors import ClientGoneError, UnavailableError

T = TypeVar("T")


class ServerState:
    """Shared by all handlers of one server; belongs to one event loop.

    Args:
        ready: whether the model is loaded already.
    """

    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready
        self.num_in_flight = 0
        self._draining = False
        self._stopped = asyncio.Event()
        self._watch: asyncio.Task[bool] | None = None

    def drain(self) -> None:
        """Lets running requests finish and refuses new ones."""
        self._draining = True

    def stop(self) -> None:
        """Ends every request that runs: each is answered with an error that says why."""
        self._draining = True
        self._stopped.set()

    def check_ready(self) -> None:
        """Raises UnavailableError while the model loads, and from the moment that the server is told to stop."""
        if not self.ready:
            raise UnavailableError("The model is still loading; /health answers 200 when it is.", retry_after_seconds=1)
        if self._draining:
            raise _stopping()

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Awaits `work`, and cancels it at once when the client goes or the server stops.

        Raises:
            ClientGoneError: the client closed the connection. The request's body must have been read before.
            UnavailableError: the server stops.
        """
        if self._watch is None:
            self._watch = asyncio.create_task(self._stopped.wait())
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        self.num_in_flight += 1
        try:
            await asyncio.wait({task, gone, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _stopping() if self._stopped.is_set() else ClientGoneError("The client closed the connection.")
        finally:
            self.num_in_flight -= 1
            gone.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def close(self) -> None:
        """Ends the task that watches for the stop."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})


def _stopping() -> UnavailableError:
    return UnavailableError("The server is shutting down; send the request to another one.", retry_after_seconds=5)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

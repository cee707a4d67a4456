"""The server's state: whether the model is loaded, how many requests run, and whether the server is stopping."""

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar.types import Receive

from quire.core.errors import UnavailableError
from quire.frontend.http.errors import ClientGoneError

T = TypeVar("T")


class ServerState:
    """State that all handlers of one server share; belongs to one event loop.

    Args:
        ready: the model is loaded already.
    """

    def __init__(self, *, ready: bool = True) -> None:
        self.ready = ready
        self._draining = asyncio.Event()
        self._stopped = False
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def num_in_flight(self) -> int:
        """Requests that the model or its tokenizer works on."""
        return len(self._running)

    @property
    def is_stopped(self) -> bool:
        """True once running requests were ended."""
        return self._stopped

    def drain(self) -> None:
        """Lets running requests finish and refuses new ones."""
        self._draining.set()

    async def until_draining(self) -> None:
        """Returns when the server takes no more requests."""
        await self._draining.wait()

    def stop(self) -> None:
        """Ends every running request: each is answered with an error that gives the reason."""
        self._draining.set()
        self._stopped = True
        for task in self._running:
            task.cancel()

    def check_ready(self) -> None:
        """Raises UnavailableError while the model loads, and once the server is stopping."""
        if not self.ready:
            raise UnavailableError("The model is still loading; /health answers 200 when it is.", retry_after_seconds=1)
        if self._draining.is_set():
            raise _stopping()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` whether or not a client waits for it; a stopping server cancels it."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Awaits `work`, and cancels it at once when the client disconnects or the server stops.

        Raises:
            ClientGoneError: the client closed the connection. The request's body must have been read before.
            UnavailableError: the server stops.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(functools.partial(_cancel, task))
        self._running.add(task)
        if self._stopped:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._stopped:
                raise _stopping() from None
            if gone.done():
                raise ClientGoneError("The client closed the connection.") from None
            raise  # the caller was cancelled
        finally:
            self._running.discard(task)
            gone.cancel()
            del task, gone  # a failed task's error has this frame in its traceback: the cycle would hold the body


def _stopping() -> UnavailableError:
    return UnavailableError("The server is shutting down; send the request to another one.", retry_after_seconds=5)


def _cancel(task: asyncio.Task[Any], _: object) -> None:
    task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

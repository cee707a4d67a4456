"""Processes each item once, for all requests that wait for it at the same time."""

import asyncio
from collections.abc import Awaitable, Callable

from quire.core.errors import ParameterError
from quire.frontend.media.messages import ReadyItem
from quire.frontend.media.sources import MediaPart

Process = Callable[[MediaPart, Callable[[], None]], Awaitable[ReadyItem]]
"""Processes an item; calls its second argument when a helper begins."""


class SharedWork:
    """Items that are being processed. To be used from one event loop."""

    def __init__(self) -> None:
        self._running: dict[bytes, _Work] = {}

    async def run(self, name: bytes, part: MediaPart, process: Process) -> ReadyItem:
        """The item of a name. It is processed as the first one's part says; work that nobody waits for any more ends,
        unless a helper has begun.

        Raises:
            ParameterError: it cannot be read; the error is about `part`.
            UnavailableError: the host is too busy.
        """
        work = self._running.get(name)
        if work is None:
            work = self._running[name] = _Work(part)
            work.task = asyncio.create_task(_done(process(part, work.begin)))
            work.task.add_done_callback(lambda _: self._forget(name, work))
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.task)  # other requests may wait for the same task
        except ParameterError as error:
            if error.param != work.part.param or work.part.param == part.param:
                raise
            raise ParameterError(str(error).replace(work.part.param, part.param, 1), param=part.param) from None
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and not work.has_begun:  # a helper that has begun would end, and load again
                self._forget(name, work)
                work.task.cancel()

    def _forget(self, name: bytes, work: "_Work") -> None:
        if self._running.get(name) is work:
            del self._running[name]


class _Work:
    """An item that is being processed for those who wait for it.

    Args:
        part: the first one's.
    """

    task: "asyncio.Task[ReadyItem]"

    def __init__(self, part: MediaPart) -> None:
        self.part = part
        self.num_waiting = 0
        self.has_begun = False

    def begin(self) -> None:
        """Notes that a helper works on it."""
        self.has_begun = True


async def _done(item: Awaitable[ReadyItem]) -> ReadyItem:
    return await item

"""The outputs of several prompts at once, in the order in which they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.turns import in_turns

T = TypeVar("T")

TASKS_PER_TURN = 64
"""Of a request's tasks that begin or end in a turn of the event loop."""


class OutputStream(Protocol):
    """The outputs of one prompt: sampled ones, or those of a beam search."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    def close(self) -> None:
        """Ends what still runs. Harmless at the end."""


class _Single(AsyncIterator[tuple[int, RequestOutput]]):
    """What `merge` makes of one stream: nearly always, and with every token."""

    __slots__ = ("_outputs",)

    def __init__(self, stream: OutputStream) -> None:
        self._outputs = aiter(stream)

    async def __anext__(self) -> tuple[int, RequestOutput]:
        return 0, await anext(self._outputs)

    async def aclose(self) -> None:
        """The caller closes the stream."""


def merge(streams: Sequence[OutputStream]) -> "_Single | AsyncGenerator[tuple[int, RequestOutput], None]":
    """(prompt index, output) of all streams as they come.

    Raises:
        QuireError: the first that any stream raises; the others are left for the caller to close.
    """
    return _Single(streams[0]) if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
        except Exception as error:  # handed on: the reader raises it
            await queue.put(error)
        await queue.put(None)

    pumps: list[asyncio.Task[None]] = []
    try:
        async for index, stream in in_turns(enumerate(streams), most=TASKS_PER_TURN):
            pumps.append(asyncio.create_task(pump(index, stream)))
        unfinished = len(streams)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        await cancel(pumps)


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Ends tasks whose results nobody waits for, waits until they have ended, and empties the list.

    An error keeps the variables of every function that it went through. Were the tasks among them, all of them would be
    freed at once, whenever the garbage collector comes.
    """
    async for task in in_turns(tasks, most=TASKS_PER_TURN):
        task.cancel()
    async for task in in_turns(_taken(tasks)):
        if not task.done():
            await asyncio.wait([task])


async def close(streams: list[OutputStream]) -> None:
    """Ends what still runs of a request, and empties the list, as `cancel` does."""
    async for stream in in_turns(_taken(streams)):
        stream.close()


def _taken(items: list[T]) -> Iterator[T]:
    while items:
        yield items.pop()

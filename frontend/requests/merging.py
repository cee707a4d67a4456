"""Merges the outputs of several prompts in the order of their arrival."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.time_slices import in_time_slices

T = TypeVar("T")

TASKS_PER_SLICE = 64
"""Most tasks of one request that one turn of the event loop starts or cancels."""


class OutputStream(Protocol):
    """The outputs of one prompt: sampled ones, or those of a beam search."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    def close(self) -> None:
        """Ends the prompt's running requests. Harmless at the end."""


class _Single(AsyncIterator[tuple[int, RequestOutput]]):
    """`merge` for one stream, the usual case: no task and no queue for each token."""

    __slots__ = ("_outputs",)

    def __init__(self, stream: OutputStream) -> None:
        self._outputs = aiter(stream)

    async def __anext__(self) -> tuple[int, RequestOutput]:
        return 0, await anext(self._outputs)

    async def aclose(self) -> None:
        """The caller closes the stream."""


def merge(streams: Sequence[OutputStream]) -> "_Single | AsyncGenerator[tuple[int, RequestOutput], None]":
    """(prompt index, output) of all streams in the order of arrival.

    Raises:
        QuireError: the first error of any stream; the caller closes the streams.
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
    item = None
    try:
        async for index, stream in in_time_slices(enumerate(streams), most=TASKS_PER_SLICE):
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
        del item  # an error, whose traceback leads here, as do the tracebacks of unread errors
        while not queue.empty():
            queue.get_nowait()


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancels tasks whose results are not needed, waits for their ends, and empties the list.

    The list is emptied because an error keeps the variables of every function that it went through. Tasks still in the
    list would all be freed at once by a later garbage collection.
    """
    async for task in in_time_slices(tasks, most=TASKS_PER_SLICE):
        task.cancel()
    async for task in in_time_slices(_taken(tasks)):
        if not task.done():
            await asyncio.wait([task])


async def close(streams: list[OutputStream]) -> None:
    """Closes the streams of a request, and empties the list, as `cancel` does."""
    async for stream in in_time_slices(_taken(streams)):
        stream.close()


def _taken(items: list[T]) -> Iterator[T]:
    while items:
        yield items.pop()

"""Divides long work for one client into short turns of the event loop, so that other requests do not wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

SLICE_SECONDS = 0.005
"""Longest turn; Python's threads switch at the same interval."""


class in_time_slices(AsyncIterator[T]):
    """Yields `items`, and lets other tasks run before the next item once a turn has taken `seconds`.

    This is no generator, because the event loop keeps a list of generators, and a request iterates four times at least.

    Args:
        most: most items in a turn, for items that start tasks: the tasks take their time after the turn.
    """

    def __init__(self, items: Iterable[T], *, seconds: float = SLICE_SECONDS, most: int | None = None) -> None:
        self._items = iter(items)
        self._seconds = seconds
        self._most = most
        self._began = time.monotonic()
        self._count = 0

    async def __anext__(self) -> T:
        if self._count and (self._count == self._most or time.monotonic() - self._began >= self._seconds):
            await asyncio.sleep(0)
            self._began, self._count = time.monotonic(), 0
        for item in self._items:
            self._count += 1
            return item
        raise StopAsyncIteration


async def in_thread_if_long(work: Callable[[], T], *, is_long: bool) -> T:
    """The result of `work`. A thread runs long work; short work would take less time than the hand-over."""
    return await asyncio.to_thread(work) if is_long else work()

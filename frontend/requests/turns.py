"""How much that one client asks for at once leaves the event loop to the others: a little of it each turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

TURN_SECONDS = 0.005
"""Of work at a stretch; Python's threads take turns of the same length."""


class in_turns(AsyncIterator[T]):
    """`items` one after another; all else has a turn between two of them when its last one was `seconds` ago.

    No generator: the event loop keeps a list of those, and a request takes four turns at least.

    Args:
        most: items in a turn, where what they cost is to come: they make tasks run, which have their turn then, too.
    """

    def __init__(self, items: Iterable[T], *, seconds: float = TURN_SECONDS, most: int | None = None) -> None:
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


async def apart(work: Callable[[], T], *, is_long: bool) -> T:
    """What `work` returns; when that is long, a thread does it, which is not worth the while of a short one."""
    return await asyncio.to_thread(work) if is_long else work()

"""How much that one client asks for at once leaves the event loop to the others: a little of it each turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

TURN_SECONDS = 0.005
"""Of work at a stretch; Python's threads take turns of the same length."""


async def in_turns(items: Iterable[T], *, seconds: float = TURN_SECONDS, most: int | None = None) -> AsyncIterator[T]:
    """`items` one after another; all else has a turn between two of them when its last one was `seconds` ago.

    Args:
        most: items in a turn, where what they cost is to come: they make tasks run, which have their turn then, too.
    """
    began, count = time.monotonic(), 0
    for item in items:
        yield item
        count += 1
        if count == most or time.monotonic() - began >= seconds:
            await asyncio.sleep(0)
            began, count = time.monotonic(), 0


async def apart(work: Callable[[], T], *, is_long: bool) -> T:
    """What `work` returns; when that is long, a thread does it, which is not worth the while of a short one."""
    return await asyncio.to_thread(work) if is_long else work()

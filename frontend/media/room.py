"""Bounds the memory of sounds that are being worked on: others wait, and too many of them are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.core.errors import OverloadedError

MAX_BYTES = 2**30
MAX_AT_ONCE = 32
MAX_WAITING = 64
RETRY_SECONDS = 10.0


class Place:
    """One request's place in a `Room`.

    Args:
        num_bytes: what its media may take, until `settle` tells.
    """

    def __init__(self, num_bytes: int, on_settled: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self._on_settled = on_settled

    def settle(self, num_bytes: int) -> None:
        """Notes what the media take."""
        self.num_bytes = num_bytes
        self._on_settled()


class Room:
    """Lets requests in, in the order of their arrival. To be used from one event loop.

    Args:
        max_bytes: nobody is let in while the media of others take so much. Those that are in may exceed it.
        max_at_once: requests that are in.
        max_waiting: requests that wait; further ones are refused.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, max_at_once: int = MAX_AT_ONCE, max_waiting: int = MAX_WAITING
    ) -> None:
        self._max_bytes = max_bytes
        self._max_at_once = max_at_once
        self._max_waiting = max_waiting
        self._inside: set[Place] = set()
        self._num_waiting = 0
        self._door = asyncio.Lock()  # whoever has it is the next to come in; a lock is fair
        self._left = asyncio.Event()

    @asynccontextmanager
    async def place(self, num_bytes: int = 0) -> AsyncIterator[Place]:
        """A place for as long as the request keeps its media, which may take `num_bytes` while they are read.

        Raises:
            OverloadedError: too many wait.
        """
        if self._num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"The server is overloaded: {self._num_waiting} sounds wait to be read. Try again in "
                f"{RETRY_SECONDS:.0f} s.",
                retry_after_seconds=RETRY_SECONDS,
            )
        place = Place(num_bytes, self._left.set)
        self._num_waiting += 1
        try:
            async with self._door:
                while not self._has_room():
                    self._left.clear()
                    await self._left.wait()
                self._inside.add(place)
        finally:
            self._num_waiting -= 1
        try:
            yield place
        finally:
            self._inside.discard(place)
            self._left.set()

    def _has_room(self) -> bool:
        held = sum(place.num_bytes for place in self._inside)
        return len(self._inside) < self._max_at_once and held < self._max_bytes

"""The events of a stream that needs no reader."""

import asyncio
from collections.abc import Sequence

from quire.frontend.entry_store.access import Events


class StreamHistory:
    """Frames that are kept as they come: any number of readers may follow them, from any frame on."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()

    @property
    def frames(self) -> Sequence[bytes]:
        """The frames so far."""
        return self._frames

    def add(self, frames: list[bytes]) -> None:
        """Appends frames; the position of a frame is its sequence number."""
        self._frames += frames
        self._wake_readers()

    def end(self) -> None:
        """Ends the stream: no more frames come."""
        self._ended = True
        self._wake_readers()

    async def read(self, start: int) -> Events:
        """The frames from number `start` on, once there are some, or the stream has ended."""
        while start >= len(self._frames) and not self._ended:
            await self._news.wait()
        return Events(self._frames[start:], self._ended)

    def _wake_readers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

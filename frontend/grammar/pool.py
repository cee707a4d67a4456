"""A pool of helper processes. Another helper is started if all helpers are busy for long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.frontend.grammar.helper_client import Helper
from quire.frontend.grammar.messages import Setup


class HelperPool:
    """Up to `max_helpers` processes; one is kept when all are idle.

    Args:
        setup: the first message to each helper.
        patience_seconds: time that all helpers must be busy before another one is started.
    """

    def __init__(self, setup: Setup, *, max_helpers: int = 4, patience_seconds: float = 0.3) -> None:
        self._setup = setup
        self._max_helpers = max_helpers
        self._patience_seconds = patience_seconds
        self._idle: list[Helper] = []
        self._is_starting = False
        self._busy: dict[Helper, float] = {}  # to the event loop's time when it became busy
        self._freed = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids of all helpers."""
        return [helper.pid for helper in [*self._idle, *self._busy]]

    @asynccontextmanager
    async def helper(self) -> AsyncIterator[Helper]:
        """A helper for one question. An error ends the helper, because it may be in the middle of an answer."""
        helper = await self._take()
        try:
            yield helper
        except BaseException:
            helper.kill()
            raise
        finally:
            del self._busy[helper]
            if helper.is_alive and not self._idle:
                self._idle.append(helper)
            else:
                helper.kill()
            self._freed.set()
            self._freed = asyncio.Event()

    async def _take(self) -> Helper:
        now = asyncio.get_running_loop().time
        while True:
            if self._idle:
                helper = self._idle.pop()
            elif self._may_start(now()):
                helper = await self._start()
            else:
                freed = self._freed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._patience_seconds):
                        await freed.wait()
                continue
            if helper.is_alive:
                self._busy[helper] = now()
                return helper

    def _may_start(self, now: float) -> bool:
        if self._is_starting or len(self._busy) >= self._max_helpers:
            return False
        return all(now - since >= self._patience_seconds for since in self._busy.values())

    async def _start(self) -> Helper:
        self._is_starting = True
        try:
            return await Helper.start(self._setup)
        finally:
            self._is_starting = False

    def close(self) -> None:
        """Ends all helpers; open questions fail."""
        for helper in [*self._idle, *self._busy]:
            helper.kill()
        self._idle.clear()

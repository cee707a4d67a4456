"""A pool of helper processes. Another helper is started if all helpers are busy for long.

Questions wait in the order of their times of arrival, to which `_SECONDS_PER_BYTE` of their sizes are added: small ones
go first, and a large one waits no longer than that for small ones which come later. One helper is left to small ones.
"""

import asyncio
import contextlib
import itertools
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, NamedTuple, TypeVar

from quire.frontend.helpers.helper import Helper, HelperProgram

A = TypeVar("A")

SMALL_BYTES = 4096
_SECONDS_PER_BYTE = 1 / 4096


class _Ticket(NamedTuple):
    """A question's place in the queue."""

    turn: float  # seconds of the event loop's clock
    number: int
    is_small: bool


class HelperPool(Generic[A]):
    """Up to `max_helpers` processes; one is kept when all are idle.

    Args:
        program: what the helpers run.
        patience_seconds: time that all helpers must be busy before another one is started.
    """

    def __init__(self, program: HelperProgram[A], *, max_helpers: int = 4, patience_seconds: float = 0.3) -> None:
        self._program = program
        self._max_helpers = max_helpers
        self._patience_seconds = patience_seconds
        self._idle: list[Helper[A]] = []
        self._is_starting = False
        self._busy: dict[Helper[A], tuple[float, _Ticket]] = {}  # (the event loop's time when it became busy, question)
        self._queue: list[_Ticket] = []  # sorted
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids of all helpers."""
        return [helper.pid for helper in [*self._idle, *self._busy]]

    @asynccontextmanager
    async def helper(self, num_bytes: int) -> AsyncIterator[Helper[A]]:
        """A helper for one question. An error ends the helper, because it may be in the middle of an answer.

        Args:
            num_bytes: the question's size, which says roughly how long it takes.
        """
        helper = await self._take(num_bytes)
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
            self._wake()

    async def _take(self, num_bytes: int) -> Helper[A]:
        now = asyncio.get_running_loop().time
        ticket = _Ticket(now() + num_bytes * _SECONDS_PER_BYTE, next(self._numbers), num_bytes <= SMALL_BYTES)
        insort(self._queue, ticket)
        try:
            while True:
                helper = await self._try_take(ticket, now())
                if helper is not None and helper.is_alive:
                    self._busy[helper] = now(), ticket
                    return helper
                if helper is None:
                    changed = self._changed
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._patience_seconds):
                            await changed.wait()
        finally:
            self._queue.remove(ticket)
            self._wake()

    async def _try_take(self, ticket: _Ticket, now: float) -> Helper[A] | None:
        """An idle helper or a new one, which may have ended; None if it is not the question's turn."""
        if ticket is not self._next():
            return None
        if self._idle:
            return self._idle.pop()
        return await self._start() if self._may_start(now) else None

    def _next(self) -> _Ticket | None:
        """The question that gets the next helper."""
        num_large = sum(not ticket.is_small for _, ticket in self._busy.values())
        has_room = num_large < max(1, self._max_helpers - 1)
        return next((ticket for ticket in self._queue if ticket.is_small or has_room), None)

    def _may_start(self, now: float) -> bool:
        if self._is_starting or len(self._busy) >= self._max_helpers:
            return False
        return all(now - since >= self._patience_seconds for since, _ in self._busy.values())

    async def _start(self) -> Helper:
        self._is_starting = True
        try:
            return await Helper.start(self._program)
        finally:
            self._is_starting = False

    def _wake(self) -> None:
        """Makes all questions in the queue look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Ends all helpers; open questions fail."""
        for helper in [*self._idle, *self._busy]:
            helper.kill()
        self._idle.clear()

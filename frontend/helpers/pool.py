"""A pool of helper processes. Another helper is started if all helpers are busy for long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from quire.frontend.helpers.helper import Helper, HelperProgram
from quire.frontend.helpers.turns import Ticket, Turns

A = TypeVar("A")


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
        self._busy: dict[Helper[A], tuple[float, Ticket]] = {}  # (the event loop's time when it became busy, question)
        self._turns = Turns(max_helpers)
        self._changed = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids of all helpers."""
        return [helper.pid for helper in [*self._idle, *self._busy]]

    @asynccontextmanager
    async def helper(self, num_bytes: int, owner: str = "") -> AsyncIterator[Helper[A]]:
        """A helper for one question. An error ends the helper, because it may be in the middle of an answer.

        Args:
            num_bytes: the question's size, which says roughly how long it takes.
            owner: the name of the key that asks; empty without keys.

        Raises:
            OverloadedError: the owner's questions that wait hold too much.
        """
        helper = await self._take(num_bytes, owner)
        try:
            yield helper
        except BaseException:
            helper.kill()
            raise
        finally:
            since, ticket = self._busy.pop(helper)
            self._turns.end(ticket, asyncio.get_running_loop().time() - since)
            if helper.is_alive and not self._idle:
                self._idle.append(helper)
            else:
                helper.kill()
            self._wake()

    async def _take(self, num_bytes: int, owner: str) -> Helper[A]:
        now = asyncio.get_running_loop().time
        ticket = self._turns.enter(now(), num_bytes, owner, self._busy.values())
        try:
            while True:
                helper = await self._try_take(ticket, now())
                if helper is not None and helper.is_alive:
                    self._busy[helper] = now(), ticket
                    self._turns.begin(ticket)
                    return helper
                if helper is None:
                    changed = self._changed
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._patience_seconds):
                            await changed.wait()
        finally:
            self._turns.leave(ticket)
            self._wake()

    async def _try_take(self, ticket: Ticket, now: float) -> Helper[A] | None:
        """An idle helper or a new one, which may have ended; None if it is not the question's turn."""
        if ticket is not self._turns.next(now, self._busy.values()):
            return None
        if self._idle:
            return self._idle.pop()
        return await self._start() if self._may_start(now) else None

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

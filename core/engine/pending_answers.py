"""Answers that the engine owes to one frontend."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

A = TypeVar("A")


class PendingAnswers(Generic[A]):
    """Futures for the answers to one kind of question. The engine answers questions in order."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[A]] = deque()

    def expect(self) -> asyncio.Future[A]:
        """A future for the answer to the question that is sent now."""
        waiter: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def give(self, answer: A) -> None:
        """Answers the oldest question."""
        waiter = self._waiters.popleft()
        if not waiter.done():  # else the caller is gone
            waiter.set_result(answer)

    def give_all(self, answer: A) -> None:
        """Answers every question, because the engine that was asked is gone."""
        while self._waiters:
            self.give(answer)

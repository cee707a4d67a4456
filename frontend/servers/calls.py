"""Questions over a link, and their answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from quire.frontend.servers.messages import Answer


class LinkEndedError(Exception):
    """The other process has ended or is about to, so no answer comes."""


class Calls:
    """Questions to the other end of one link.

    Args:
        send: sends a question with the number of its call.
    """

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        self._send = send
        self._num_calls = 0
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._ended = False

    async def ask(self, question: Any, kind: Any) -> Any:
        """Asks a question, and returns the answer, of the type `kind`. Raises LinkEndedError."""
        if self._ended:
            raise LinkEndedError
        self._num_calls += 1
        call_id = self._num_calls
        self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._send(call_id, question)
        try:
            return msgspec.msgpack.decode(await self._waiting[call_id], type=kind)
        finally:
            del self._waiting[call_id]

    def on_answer(self, answer: Answer) -> None:
        """Takes an answer of the other end."""
        waiter = self._waiting.get(answer.call_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer.value)

    def end(self) -> None:
        """Fails all waiting calls: no answers will come any more."""
        self._ended = True
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(LinkEndedError())

"""Keys' limits, which API servers ask their parent for."""

import asyncio
import socket
from typing import Any

import pytest

from quire.core.errors import UnavailableError
from quire.frontend.entry_store.store import EntryStore
from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.servers.calls import Calls
from quire.frontend.servers.messages import Answer, AskedOfParent, ControlLink, CountUse, FromServer, ToServer
from quire.frontend.servers.parent_answers import ParentAnswers
from quire.frontend.servers.shared_entries import SharedStore
from quire.frontend.servers.shared_limits import SharedLimits
from quire.frontend.servers.shared_metrics import SharedMetrics


def test_the_parent_counts_for_all_and_its_end_is_told() -> None:
    async def main() -> None:
        limits = RateLimits()
        store = SharedStore(EntryStore(10, 1000, 100.0), lambda number: None)
        answers = ParentAnswers(store, SharedMetrics(lambda scrape_id: set(), lambda: ()), limits)
        servers = [await Link.open(answers, limits) for _ in range(2)]
        taken = [await servers[number % 2].limits.take("a", "requests", 1, 3) for number in range(5)]
        assert taken[:3] == [0.0] * 3
        assert all(0 < seconds <= 61 for seconds in taken[3:])
        servers[0].limits.add("a", "tokens", 90)
        assert await servers[0].limits.take("a", "tokens", 10, 100) == 0.0
        assert await servers[1].limits.take("a", "tokens", 1, 100) > 0, "the other has counted an output"
        assert await servers[1].limits.take("b", "tokens", 1, 100) == 0.0
        servers[0].calls.end()
        with pytest.raises(UnavailableError):
            await servers[0].limits.take("a", "requests", 1, 3)
        for server in servers:
            await server.close()

    asyncio.run(main())


class Link:
    """A server and its parent, in one process, with a socket between them."""

    @classmethod
    async def open(cls, answers: ParentAnswers, limits: RateLimits) -> "Link":
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        self = cls()
        self.parent: ControlLink[Any] = await ControlLink.open(ours, FromServer)
        self.server: ControlLink[Any] = await ControlLink.open(theirs, ToServer)
        self.calls = Calls(lambda call_id, question: self.server.send(AskedOfParent(call_id, question)))
        self.limits = SharedLimits(self.calls, self.server.send)
        self.tasks = [asyncio.create_task(self._serve(answers, limits)), asyncio.create_task(self._listen())]
        return self

    async def _serve(self, answers: ParentAnswers, limits: RateLimits) -> None:
        while (message := await self.parent.receive()) is not None:
            match message:
                case CountUse():
                    limits.add(message.name, message.quantity, message.amount)
                case AskedOfParent():
                    answers.on_asked(self.parent, message)

    async def _listen(self) -> None:
        while (message := await self.server.receive()) is not None:
            assert isinstance(message, Answer)
            self.calls.on_answer(message)

    async def close(self) -> None:
        self.server.close()
        await self.tasks[0]
        self.parent.close()
        await self.tasks[1]

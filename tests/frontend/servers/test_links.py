"""What servers and their parent say to each other when one of them has ended."""

import asyncio
import socket
from typing import Any

import msgspec
import uvloop

from quire.frontend.entry_store.access import Look
from quire.frontend.entry_store.store import Entry, EntryStore
from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.servers.calls import Calls
from quire.frontend.servers.messages import (
    BEHIND_BYTES,
    AskedOfParent,
    AskMaker,
    ControlLink,
    FromServer,
    Placed,
    PutEntry,
)
from quire.frontend.servers.parent_answers import ParentAnswers
from quire.frontend.servers.shared_entries import SharedStore
from quire.frontend.servers.shared_metrics import SharedMetrics


def test_what_is_sent_to_a_process_that_has_ended_is_lost() -> None:
    """Under the event loop that serves, which raises at the second message."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link: ControlLink[Any] = await ControlLink.open(ours, FromServer)
        theirs.close()
        for _ in range(3):
            link.send(Placed([]))
            await asyncio.sleep(0.01)
        assert await link.receive() is None
        link.close()
        link.send(Placed([]))

    uvloop.run(main())


def test_a_process_that_reads_nothing_is_behind() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link: ControlLink[Any] = await ControlLink.open(ours, FromServer)
        news = Placed([(0, bytes(BEHIND_BYTES // 8))])
        link.send(Placed([]))
        assert not link.is_behind
        for _ in range(20):
            link.send(news)
        assert link.is_behind
        theirs.setblocking(False)
        while link.is_behind:
            theirs.recv(1 << 20)
            await asyncio.sleep(0)
        theirs.close()
        link.close()

    uvloop.run(main())


def test_what_a_server_puts_as_it_ends_is_lost_and_not_made_for_ever() -> None:
    """The parent keeps it before it reads the next message, and so before it sees the end."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link: ControlLink[FromServer] = await ControlLink.open(ours, FromServer)
        entries = EntryStore(10, 1000, 100.0)
        store = SharedStore(entries, lambda number: None)
        answers = ParentAnswers(store, SharedMetrics(lambda scrape_id: set(), lambda: ()), RateLimits())
        put = PutEntry(Entry(id="a", body=b"", maker=1, version=5), "nothing")
        answers.on_asked(link, AskedOfParent(1, put))
        store.on_server_ended(1)
        await asyncio.sleep(0)
        lost = entries.find("a")
        assert lost is not None
        assert lost.is_lost
        assert entries.num_in_making == 0
        assert await store.ask(AskMaker(1, Look(5))) is None
        link.close()
        theirs.close()

    asyncio.run(main())


def test_a_question_to_a_server_that_ends_is_answered_with_none() -> None:
    async def main() -> None:
        sent: list[Any] = []
        calls = Calls(lambda call_id, question: sent.append((call_id, question)))
        store = SharedStore(EntryStore(10, 1000, 100.0), lambda number: calls)
        asking = asyncio.create_task(store.ask(AskMaker(1, Look(1))))
        await asyncio.sleep(0)
        assert msgspec.structs.astuple(sent[0][1]) == (1,)
        calls.end()
        assert await asking is None
        assert await store.ask(AskMaker(1, Look(1))) is None
        assert len(sent) == 1

    asyncio.run(main())

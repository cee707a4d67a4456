"""What servers and their parent say to each other when one of them has ended."""

import asyncio
import socket
from typing import Any

import msgspec
import uvloop

from quire.frontend.kept.access import Look
from quire.frontend.kept.entries import Entry, EntryStore
from quire.frontend.servers.calls import Calls
from quire.frontend.servers.messages import (
    AskMaker,
    ControlLink,
    FindEntry,
    FromServer,
    Placed,
    PutEntry,
    RemoveEntry,
)
from quire.frontend.servers.shared_entries import SharedStore


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


def test_what_a_server_puts_as_it_ends_is_lost_and_not_made_for_ever() -> None:
    """The parent handles a message before it reads the next one, and so before it sees the end."""

    async def main() -> None:
        entries = EntryStore(10, 1000, 100.0)
        store = SharedStore(entries, lambda number: None)
        assert store.answer(PutEntry(Entry(id="a", body=b"", maker=1), "nothing")) == "kept"
        store.on_server_ended(1)
        assert store.answer(FindEntry("a")).is_lost
        assert entries.num_in_making == 0
        assert await store.ask(AskMaker(1, Look(1))) is None
        store.answer(RemoveEntry("a"))
        assert store.answer(FindEntry("a")) is None

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

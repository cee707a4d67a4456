"""The entries of several API servers. Their parent stores them, and passes on questions from server to server."""

from collections.abc import Callable
from typing import Any

from quire.core.errors import UnavailableError
from quire.frontend.entry_store.access import Answerer, MakerQuestion
from quire.frontend.entry_store.store import Entry, EntryStore, Put, Replaces
from quire.frontend.servers.calls import Calls, LinkEndedError
from quire.frontend.servers.messages import AskMaker, CountInMaking, FindEntry, PutEntry, RemoveEntry


class SharedEntries:
    """The entries of all servers, seen from one of them.

    Args:
        server: the number of this server.
        calls: go to the parent.
    """

    def __init__(self, server: int, calls: Calls) -> None:
        self.server = server
        self._calls = calls
        self._answer: Answerer = _knows_nothing

    async def find(self, entry_id: str, owner: str = "") -> Entry | None:
        found: Entry | None = await self._ask(FindEntry(entry_id, owner), Entry | None)
        return found

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put:
        put: Put = await self._ask(PutEntry(entry, replaces), Put)
        return put

    async def remove(self, entry_id: str, owner: str = "") -> None:
        await self._ask(RemoveEntry(entry_id, owner), None)

    async def num_in_making_of(self, owner: str) -> int:
        number: int = await self._ask(CountInMaking(owner), int)
        return number

    async def ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        answer: bytes | None = await self._ask(AskMaker(maker, question), bytes | None)
        return answer

    def answer_with(self, answer: Answerer) -> None:
        self._answer = answer

    async def answer(self, question: MakerQuestion) -> bytes | None:
        """Answers another server's question."""
        return await self._answer(question)

    async def _ask(self, question: Any, kind: Any) -> Any:
        try:
            return await self._calls.ask(question, kind)
        except LinkEndedError:
            raise UnavailableError("The server is shutting down.", retry_after_seconds=5) from None


async def _knows_nothing(question: MakerQuestion) -> bytes | None:
    return None


class SharedStore:
    """The parent's side of `SharedEntries`.

    Args:
        calls_to: the calls to the server with a number; None if none runs.
    """

    def __init__(self, store: EntryStore, calls_to: Callable[[int], Calls | None]) -> None:
        self._store = store
        self._calls_to = calls_to

    def answer(self, question: FindEntry | PutEntry | RemoveEntry | CountInMaking) -> Any:
        """Answers a server's question about the entries."""
        match question:
            case FindEntry():
                return self._store.find(question.entry_id, question.owner)
            case PutEntry():
                return self._store.put(question.entry, replaces=question.replaces)
            case RemoveEntry():
                return self._store.remove(question.entry_id, question.owner)
            case CountInMaking():
                return self._store.num_in_making_of(question.owner)

    async def ask(self, asked: AskMaker) -> bytes | None:
        """Passes a question on to the server that makes an entry, and returns its answer."""
        calls = self._calls_to(asked.maker)
        if calls is None:
            return None
        try:
            answer: bytes | None = await calls.ask(asked.question, bytes | None)
        except LinkEndedError:
            return None
        return answer

    def on_server_ended(self, number: int) -> None:
        """Marks the entries that an ended server was making as lost."""
        self._store.on_maker_ended(number)

"""How a server reaches the entries of its command, and the servers that are making some of them."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from quire.frontend.entry_store.store import Entry, EntryStore, Put, Replaces


class Look(Struct, array_like=True, tag="look"):
    """How far is the entry? Answered with its body."""

    version: int


class ReadEvents(Struct, array_like=True, tag="read_events"):
    """Which events are there from number `start` on? Answered with `Events`, as soon as there are some."""

    version: int
    start: int


class Cancel(Struct, array_like=True, tag="cancel"):
    """Make it no longer, and keep it as it is. Answered with its body."""

    version: int


class Abandon(Struct, array_like=True, tag="abandon"):
    """Make it no longer: nobody wants it. Answered with nothing."""

    version: int


class Events(Struct, array_like=True):
    """Some events of an entry, in order."""

    frames: list[bytes]
    ended: bool  # no more will come


MakerQuestion = Look | ReadEvents | Cancel | Abandon
"""What the server is asked that makes the entry of a version. It answers None if it makes none such any more."""

Answerer = Callable[[MakerQuestion], Awaitable[bytes | None]]


class StoredEntries(Protocol):
    """The entries of a command, which may have several servers. See `EntryStore`.

    Attributes:
        server: the number of this server, as in `Entry.maker`.
    """

    server: int

    async def find(self, entry_id: str) -> Entry | None: ...

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put: ...

    async def remove(self, entry_id: str) -> None: ...

    async def num_in_making(self) -> int: ...

    async def ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        """The answer of another server to a question about what it makes."""

    def answer_with(self, answer: Answerer) -> None:
        """Has `answer` answer what other servers ask this one."""


class LocalEntries:
    """See `StoredEntries`: those of a command's only server."""

    server = 0

    def __init__(self, store: EntryStore) -> None:
        self._store = store

    async def find(self, entry_id: str) -> Entry | None:
        return self._store.find(entry_id)

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put:
        return self._store.put(entry, replaces=replaces)

    async def remove(self, entry_id: str) -> None:
        self._store.remove(entry_id)

    async def num_in_making(self) -> int:
        return self._store.num_in_making

    async def ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        """None: there is no other server."""
        return None

    def answer_with(self, answer: Answerer) -> None:
        """Nobody asks."""

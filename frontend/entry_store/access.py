"""A server's access to its command's entries, and to the servers that still make some of them."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from quire.frontend.entry_store.store import Entry, EntryStore, Put, Replaces


class Look(Struct, array_like=True, tag="look"):
    """Asks for an entry's present state. Answered with its body."""

    version: int


class ReadEvents(Struct, array_like=True, tag="read_events"):
    """Asks for the events from number `start` on. Answered with `Events`, as soon as there are some."""

    version: int
    start: int


class Cancel(Struct, array_like=True, tag="cancel"):
    """Stops the making of an entry, and keeps it as it is. Answered with its body."""

    version: int


class Abandon(Struct, array_like=True, tag="abandon"):
    """Stops the making of an entry that no client wants. Answered with nothing."""

    version: int


class Events(Struct, array_like=True):
    """Some events of an entry, in order."""

    frames: list[bytes]
    ended: bool  # no more will come


MakerQuestion = Look | ReadEvents | Cancel | Abandon
"""A question to the server that makes the entry of a version. The answer is None if it no longer makes the entry."""

Answerer = Callable[[MakerQuestion], Awaitable[bytes | None]]


class StoredEntries(Protocol):
    """The entries of a command, which may have several servers. `EntryStore` explains the operations.

    Attributes:
        server: the number of this server, as in `Entry.maker`.
    """

    server: int

    async def find(self, entry_id: str, owner: str = "") -> Entry | None: ...

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put: ...

    async def remove(self, entry_id: str, owner: str = "") -> None: ...

    async def num_in_making_of(self, owner: str) -> int: ...

    async def ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        """Asks another server about an entry that it makes, and returns the answer."""

    def answer_with(self, answer: Answerer) -> None:
        """Sets the function that answers other servers' questions."""


class LocalEntries:
    """The entries of a command with a single server."""

    server = 0

    def __init__(self, store: EntryStore) -> None:
        self._store = store

    async def find(self, entry_id: str, owner: str = "") -> Entry | None:
        return self._store.find(entry_id, owner)

    async def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put:
        return self._store.put(entry, replaces=replaces)

    async def remove(self, entry_id: str, owner: str = "") -> None:
        self._store.remove(entry_id, owner)

    async def num_in_making_of(self, owner: str) -> int:
        return self._store.num_in_making_of(owner)

    async def ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        """Returns None, because there is no other server."""
        return None

    def answer_with(self, answer: Answerer) -> None:
        """Does nothing, because no other server asks."""

"""Stores entries by id, within bounds. Their content is opaque here."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Put = Literal["kept", "too large", "no room", "changed"]
"""The result of storing an entry: it is kept; it is too large by itself; entries in the making left it no room; or the
entry under its id is not the one that it shall replace."""

Replaces = int | Literal["anything", "nothing"]
"""The entry that may be replaced: any under the same id, none, or the one of a version."""


class Entry(Struct, array_like=True, frozen=True, kw_only=True):
    """An entry that is stored under an id.

    Attributes:
        owner: the name of the API key under which it was stored; empty without keys. Nobody else finds it.
        body: in a form that the writers and readers agree on.
        events: frames of a stream that may be read again; None if there was none.
        maker: the number of the server that still makes it; None for one that is finished.
        is_lost: its maker ended before it was finished.
        version: what `EntryStore.put` compares, so that no change is lost. That of an entry in the making names the
            making: its id may be deleted and taken again before the making has ended.
    """

    id: str
    body: bytes
    events: list[bytes] | None = None
    maker: int | None = None
    is_lost: bool = False
    version: int = 0
    owner: str = ""

    @property
    def place(self) -> "Place":
        """Its place in a store."""
        return self.owner, self.id


Place = tuple[str, str]
"""An entry's owner and id. The ids of one owner differ; two owners may have the same."""


class _Stored(Struct):
    entry: Entry
    stored_at: float
    num_bytes: int


class EntryStore:
    """Stores entries. Drops those of the owner that has the most first, and of these the least recently changed ones:
    so nobody's entries are dropped for another who keeps more. Never drops an entry that is still being made.

    Args:
        max_entries: most entries kept; 0 keeps none.
        max_bytes: most bytes of all of them together.
        max_age_seconds: how long one is kept after its last change.
    """

    def __init__(
        self,
        max_entries: int,
        max_bytes: int,
        max_age_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._kept: dict[Place, _Stored] = {}  # the oldest first
        self._num_bytes = 0
        self._counts: Counter[str] = Counter()  # entries by owner
        self._bytes: Counter[str] = Counter()  # by owner

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, entry_id: str) -> bool:
        return ("", entry_id) in self._kept

    @property
    def num_in_making(self) -> int:
        """Entries that are still being made."""
        return sum(1 for each in self._kept.values() if each.entry.maker is not None)

    def num_in_making_of(self, owner: str) -> int:
        """An owner's entries that are still being made."""
        return sum(1 for each in self._kept.values() if each.entry.maker is not None and each.entry.owner == owner)

    def find(self, entry_id: str, owner: str = "") -> Entry | None:
        """The entry of an owner with an id; None if there is none, or it was dropped."""
        self._drop_old()
        kept = self._kept.get((owner, entry_id))
        return None if kept is None else kept.entry

    def put(self, entry: Entry, *, replaces: Replaces = "anything") -> Put:
        """Stores a new or changed entry, and drops old ones for it. An entry that cannot be stored still drops the one
        before it."""
        if replaces != "anything":
            before = self.find(entry.id, entry.owner)
            if replaces != ("nothing" if before is None else before.version):
                return "changed"
        self.remove(entry.id, entry.owner)
        num_bytes = len(entry.body) + sum(map(len, entry.events or ()))
        if num_bytes > self._max_bytes and entry.maker is None:
            return "too large"
        self._kept[entry.place] = _Stored(entry, self._clock(), num_bytes)
        self._count(entry, 1, num_bytes)
        self._make_room()
        return "kept" if entry.place in self._kept else "no room"

    def remove(self, entry_id: str, owner: str = "") -> None:
        """Forgets an entry, if there is one."""
        kept = self._kept.pop((owner, entry_id), None)
        if kept is not None:
            self._count(kept.entry, -1, -kept.num_bytes)

    def _count(self, entry: Entry, num_entries: int, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._counts[entry.owner] += num_entries
        self._bytes[entry.owner] += num_bytes

    def on_maker_ended(self, maker: int) -> None:
        """Marks the entries of a server that has ended as lost: they will not be finished."""
        for kept in self._kept.values():
            if kept.entry.maker == maker:
                kept.entry = replace(kept.entry, maker=None, is_lost=True)

    def _make_room(self) -> None:
        self._drop_old()
        for counts, most in ((self._counts, self._max_entries), (self._bytes, self._max_bytes)):
            owners = [owner for owner, _ in counts.most_common()] if counts.total() > most else []
            while counts.total() > most and owners:
                owner = max(owners, key=counts.__getitem__)
                if not self._drop_oldest(owner):
                    owners.remove(owner)

    def _drop_oldest(self, owner: str) -> bool:
        """Drops an owner's oldest finished entry. Returns False if there is none."""
        for kept in self._kept.values():
            if kept.entry.owner == owner and kept.entry.maker is None:
                self.remove(kept.entry.id, kept.entry.owner)
                return True
        return False

    def _drop_old(self) -> None:
        oldest = self._clock() - self._max_age_seconds
        for kept in list(self._kept.values()):
            if kept.stored_at > oldest:
                return
            if kept.entry.maker is None:
                self.remove(kept.entry.id, kept.entry.owner)

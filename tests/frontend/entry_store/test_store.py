"""The bounds within which entries are kept."""

import asyncio

import pytest

from quire.core.errors import OverloadedError
from quire.frontend.entry_store.access import LocalEntries
from quire.frontend.entry_store.store import Entry, EntryStore
from quire.frontend.openai.responses.background_responses import Makings
from quire.frontend.openai.responses.store import ResponseStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(name: str, num_bytes: int = 10, *, maker: int | None = None, version: int = 0) -> Entry:
    return Entry(id=name, body=b"x" * num_bytes, maker=maker, version=version)


def names(store: EntryStore) -> list[str]:
    return [name for name in "abcdef" if name in store]


def test_the_oldest_make_room_in_number_bytes_and_age() -> None:
    clock = Clock()
    store = EntryStore(3, 10_000, 100.0, clock)
    for name in "abcd":
        assert store.put(entry(name)) == "kept"
        clock.now += 30
    assert names(store) == ["b", "c", "d"]
    store.put(Entry(id="e", body=b"x" * 9000, events=[b"x" * 900, b"x" * 95]))
    assert names(store) == ["e"], "bytes count, too, and those of events"
    assert store.put(entry("f", 20_000)) == "too large"
    assert names(store) == ["e"], "what is too large alone is not kept, and drives nothing out"
    clock.now += 101
    assert store.find("e") is None
    assert len(store) == 0


def test_what_is_still_made_is_never_driven_out() -> None:
    store = EntryStore(2, 10_000, 100.0)
    responses = ResponseStore(LocalEntries(store), Makings(), max_entries=2, max_bytes=10_000)
    store.put(entry("a", maker=1))
    asyncio.run(responses.check_room())
    for name in "bcd":
        store.put(entry(name))
    assert names(store) == ["a", "d"]
    store.put(entry("e", maker=2))
    assert names(store) == ["a", "e"]
    with pytest.raises(OverloadedError):
        asyncio.run(responses.check_room())
    store.on_maker_ended(1)
    asyncio.run(responses.check_room())
    lost = store.find("a")
    assert lost is not None
    assert (lost.maker, lost.is_lost, store.num_in_making) == (None, True, 1)
    store.put(entry("f"))
    assert names(store) == ["e", "f"]
    store.put(entry("a", maker=2))
    assert store.put(entry("b")) == "no room"
    assert names(store) == ["a", "e"]


def test_an_entry_replaces_only_the_version_that_it_was_made_of() -> None:
    store = EntryStore(2, 10_000, 100.0)
    assert store.put(entry("a", version=2), replaces=1) == "changed"
    assert names(store) == []
    store.put(entry("a", version=1))
    assert store.put(entry("a", version=2), replaces=1) == "kept"
    assert store.put(entry("a", version=3), replaces=1) == "changed"
    assert store.put(entry("a", 20_000, version=3), replaces=2) == "too large"
    assert names(store) == [], "a version that is no longer true is not kept"


def test_a_new_entry_does_not_replace_another_one() -> None:
    store = EntryStore(2, 10_000, 100.0)
    assert store.put(entry("a", version=1), replaces="nothing") == "kept"
    assert store.put(entry("a", version=2), replaces="nothing") == "changed"
    kept = store.find("a")
    assert kept is not None
    assert kept.version == 1

"""Keeps processed items for prompts that have them again."""

from collections import OrderedDict
from typing import Protocol

from quire.frontend.media.messages import ReadyItem


class ItemCache(Protocol):
    """Processed items by name."""

    async def get(self, name: bytes) -> ReadyItem | None:
        """The item of a name, if it is kept."""
        ...

    async def put(self, name: bytes, made: ReadyItem) -> None:
        """Keeps an item."""
        ...

    def clear(self) -> None:
        """Forgets all."""
        ...

    def close(self) -> None:
        """Forgets all for good."""
        ...


class OwnItems:
    """Those of this process; an `ItemCache`. Items unused for longest are forgotten first.

    Args:
        max_bytes: of all arrays.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[bytes, ReadyItem] = OrderedDict()

    async def get(self, name: bytes) -> ReadyItem | None:
        if name in self._items:
            self._items.move_to_end(name)
        return self._items.get(name)

    async def put(self, name: bytes, made: ReadyItem) -> None:
        if name in self._items:
            return
        self._items[name] = made
        self._num_bytes += size_of(made)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._num_bytes -= size_of(oldest)

    def clear(self) -> None:
        self._items.clear()
        self._num_bytes = 0

    def close(self) -> None:
        self.clear()


def size_of(made: ReadyItem) -> int:
    """The bytes of an item's arrays."""
    return sum(len(array.data) for arrays in (made.facts, made.arrays) for array in arrays.values())

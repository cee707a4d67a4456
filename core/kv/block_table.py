"""The pages that hold a request's keys and values in one KV group."""

from typing import NamedTuple

from quire.core.kv.groups import KVGroup
from quire.core.wire.kv_groups import NO_PAGE


class BlockTable:
    """Pages of consecutive blocks of one request; `pages[i]` holds block `first + i`.

    Blocks before `first` have no page: it was released, or never allocated because a prefix-cache hit needed none
    there.
    """

    __slots__ = ("first", "group", "pages")

    def __init__(self, group: KVGroup, first: int = 0, pages: list[int] | None = None) -> None:
        self.group = group
        self.first = first
        self.pages = [] if pages is None else pages

    @property
    def end(self) -> int:
        """The block after the last one that has a page."""
        return self.first + len(self.pages)

    def drop_before(self, block: int) -> list[int]:
        """Removes the pages of blocks `first` to `block - 1` from the table and returns them."""
        num_dropped = block - self.first
        dropped = self.pages[:num_dropped]
        del self.pages[:num_dropped]
        self.first = block
        return dropped

    def on_wire(self) -> list[int]:
        """A page for every block from the request's first on, `NO_PAGE` for blocks without one."""
        return [NO_PAGE] * self.first + self.pages


class CachedPrefix(NamedTuple):
    """The leading blocks of a request that the prefix cache has.

    Attributes:
        num_blocks: how many; every KV group can continue after them.
        tables: per KV group, a table that ends there.
        snapshot: the pages of the recurrent state there, if the model has one.
        encoded: per KV group of the kind "cross", the pages of the request's encoder input; None: not in the cache.
    """

    num_blocks: int
    tables: list[BlockTable]
    snapshot: list[int]
    encoded: list[list[int]] | None = None

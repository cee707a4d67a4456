"""Snapshots of recurrent states in the prefix cache: existing ones, and the next ones to take.

A recurrent layer's state cannot go back to an earlier token, so a request can only continue from a copy of the state
after exactly the tokens that it shares. A copy is taken after every `interval` tokens, into pages without references.
Such pages may be evicted at any time: snapshots are a bonus, and never make a request wait.

Unlike a page of keys and values, a snapshot exists only after its step. So it is findable from the next plan on. Until
then, and until its tokens are known, it has a name that no look-up uses.
"""

from collections.abc import Callable, Iterable
from itertools import count

from quire.core.kv.page_pool import PageKey, PagePool
from quire.core.kv.paged_request import PagedRequest, PlannedSnapshot

_PLANNED = b"planned "


class Snapshots:
    """The snapshots in `pool`.

    Args:
        num_pages: of one snapshot.
        interval: blocks between two snapshots.
        first_group: the number by which the first page of a snapshot is named in the pool, where pages of keys and
            values have the number of their KV group. Further pages have further numbers.
    """

    def __init__(self, pool: PagePool, *, num_pages: int, interval: int, block_size: int, first_group: int) -> None:
        self._pool = pool
        self._interval = interval
        self._block_size = block_size
        self._groups = range(first_group, first_group + num_pages)
        self._serial = count()

    def next_border(self, num_tokens: int) -> int:
        """The number of tokens, more than `num_tokens`, after which the next snapshot is due."""
        size = self._interval * self._block_size
        return num_tokens // size * size + size

    def longest_prefix(self, hashes: list[bytes], num_blocks: int, has: Callable[[PageKey], bool]) -> int:
        """The most leading blocks, up to `num_blocks`, after which there is a whole snapshot: `has` all its pages."""
        num_blocks -= num_blocks % self._interval
        while num_blocks and not all(has(key) for key in self._keys(hashes[num_blocks - 1])):
            num_blocks -= self._interval
        return num_blocks

    def keys_after(self, hashes: list[bytes], num_blocks: int) -> list[PageKey]:
        """The keys of the snapshot after `num_blocks` blocks, which `longest_prefix` has found; none for 0 blocks."""
        return list(self._keys(hashes[num_blocks - 1])) if num_blocks else []

    @staticmethod
    def is_planned(key: PageKey) -> bool:
        """Returns True for a page of a snapshot that is not findable yet."""
        return key[0].startswith(_PLANNED)

    def take_snapshot(self, request: PagedRequest, num_tokens: int) -> PlannedSnapshot | None:
        """Plans a snapshot of `request` after `num_tokens` tokens. The plan being made computes the last of them.

        Returns None if none is due, if there is one already, or if pages in use leave no room.
        """
        num_blocks, rest = divmod(num_tokens, self._block_size)
        if rest or num_blocks % self._interval or len(self._groups) > self._pool.num_available:
            return None
        if num_blocks <= len(request.block_hashes) and self._is_whole(request.block_hashes[num_blocks - 1]):
            return None
        name = _PLANNED + b"%d" % next(self._serial)  # no hash of a block has this form
        pages = self._pool.allocate(len(self._groups))
        for page, key in zip(pages, self._keys(name), strict=True):
            self._pool.name(page, key)
        self._pool.release(pages)
        snapshot = PlannedSnapshot(num_blocks, name, pages)
        request.planned_snapshots.append(snapshot)
        return snapshot

    def has_pages(self, snapshot: PlannedSnapshot) -> bool:
        """Returns True if no page of `snapshot` was evicted since `take_snapshot`."""
        return self._is_whole(snapshot.name)

    def announce(self, request: PagedRequest, num_blocks: int) -> None:
        """Makes the snapshots of the first `num_blocks` blocks of `request` findable. Their blocks have hashes, and
        earlier plans took them."""
        planned = request.planned_snapshots
        while planned and planned[0].num_blocks <= num_blocks:
            snapshot = planned.pop(0)
            digest = request.block_hashes[snapshot.num_blocks - 1]
            if self.has_pages(snapshot) and not self._is_whole(digest):
                self._pool.disown(self._keys(digest))  # the remains of an older one
                self._pool.rename(zip(self._keys(snapshot.name), self._keys(digest), strict=True))
            else:
                self._pool.disown(self._keys(snapshot.name))

    def forget(self, request: PagedRequest) -> None:
        """Drops snapshots of `request` whose tokens will never be known."""
        for snapshot in request.planned_snapshots:
            self._pool.disown(self._keys(snapshot.name))
        request.planned_snapshots.clear()

    def disown(self, hashes: list[bytes]) -> None:
        """Makes all snapshots of a sequence unfindable."""
        for digest in hashes[self._interval - 1 :: self._interval]:
            self._pool.disown(self._keys(digest))

    def _is_whole(self, name: bytes) -> bool:
        find = self._pool.find
        return all(find(key) is not None for key in self._keys(name))

    def _keys(self, name: bytes) -> Iterable[PageKey]:
        return ((name, group) for group in self._groups)

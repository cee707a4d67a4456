"""Pages that leave the pool for a lower tier of memory, and loads that bring them back.

The pool names content by keys. When it evicts a page, a lower tier may save the content under the same key. A
request that would continue from it waits until a load has put it into pages of the pool again. A load ends with cached
pages, which the request finds as it finds any prefix.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from quire.core.kv.page_pool import PageKey, PagePool
from quire.core.wire.page_moves import PageMove, Tier


class Place(NamedTuple):
    """A page of a tier."""

    tier: Tier
    page: int


class LowerTiers(Protocol):
    """Decides what is saved when pages leave the pool, and where. It owns the pages of tiers below the device."""

    def find(self, key: PageKey) -> Place | None:
        """The page that holds the content of `key`, or will when the plans so far are executed."""

    def save(self, key: PageKey) -> Place | None:
        """The page for the content of `key`, which leaves the pool. None: it is there already, or is given up."""

    def hold(self, keys: Iterable[PageKey]) -> None:
        """Keeps the content of `keys`, which `find` has found, until `let_go`. Several loads may hold a key."""

    def let_go(self, keys: Iterable[PageKey]) -> None:
        """Ends `hold`."""

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Drops the content of `keys`, because it cannot be trusted. It may be held."""

    def clear(self) -> None:
        """Drops all content."""


class PageLoad:
    """A load in flight.

    Attributes:
        pages: by key, the pages of the pool that will hold the content.
        shared: pages of the pool that the same requests need; held, so that the pool keeps them.
        move_ids: of moves that no result has reported.
        is_void: the content cannot be trusted.
    """

    def __init__(self, pages: dict[PageKey, int], shared: list[int], move_ids: set[int]) -> None:
        self.pages = pages
        self.shared = shared
        self.move_ids = move_ids
        self.is_void = False

    @property
    def held_pages(self) -> list[int]:
        """All pages of the pool that the load has a reference to."""
        return [*self.pages.values(), *self.shared]


class PageLoads:
    """Saves and loads of one pool.

    Attributes:
        moves: those of the plan that is being built, in order.
    """

    def __init__(self, pool: PagePool, tiers: LowerTiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._move_ids = count()
        self._by_move: dict[int, PageLoad] = {}
        self._by_key: dict[PageKey, PageLoad] = {}
        self.moves: list[PageMove] = []

    def __len__(self) -> int:
        return len({id(load) for load in self._by_move.values()})

    @property
    def held_pages(self) -> list[int]:
        """Each page of the pool, as often as loads refer to it."""
        loads = {id(load): load for load in self._by_move.values()}
        return [page for load in loads.values() for page in load.held_pages]

    def has(self, key: PageKey) -> bool:
        """Returns True if the pool or a lower tier has the content of `key`."""
        return self._pool.has(key) or self._tiers.find(key) is not None

    def save(self, page: int, key: PageKey) -> None:
        """Saves an evicted `page` in a lower tier, before the plan that is being built writes to it."""
        place = self._tiers.save(key)
        if place is not None:
            self.moves.append(PageMove("device", [page], place.tier, [place.page]))

    def underway(self, keys: Sequence[PageKey]) -> PageLoad | None:
        """Returns a load in flight that brings some of `keys`."""
        return next((self._by_key[key] for key in keys if key in self._by_key), None)

    def start(self, keys: Sequence[PageKey], num_spare: int) -> PageLoad | None:
        """Starts to load those of `keys` that the pool has not, none of which is underway.

        Returns None if that would leave fewer than `num_spare` pages.
        """
        missing = [key for key in keys if not self._pool.has(key)]
        shared = self._pool.pages_of(key for key in keys if self._pool.has(key))
        if len(missing) + self._pool.num_cached_among(shared) + num_spare > self._pool.num_available:
            return None
        self._tiers.hold(missing)
        self._pool.share(shared)
        pages = dict(zip(missing, self._pool.allocate(len(missing)), strict=True))
        by_tier: dict[Tier, list[PageKey]] = defaultdict(list)
        for key in missing:
            by_tier[self._place(key).tier].append(key)
        load = PageLoad(pages, shared, set())
        for tier, each in by_tier.items():
            move_id = next(self._move_ids)
            sources, targets = [self._place(key).page for key in each], [pages[key] for key in each]
            self.moves.append(PageMove(tier, sources, "device", targets, move_id))
            load.move_ids.add(move_id)
            self._by_move[move_id] = load
        self._by_key |= dict.fromkeys(missing, load)
        return load

    def finish(self, move_id: int) -> PageLoad | None:
        """Takes in that a move is done. Returns its load if that was the last move; its pages are cached then."""
        load = self._by_move.pop(move_id)
        load.move_ids.remove(move_id)
        if load.move_ids:
            return None
        for key, page in load.pages.items():
            del self._by_key[key]
            if not load.is_void:
                self._pool.name(page, key)
        self._tiers.let_go(load.pages)
        # The last page is evicted first, as when a request ends.
        self._pool.release(reversed(load.held_pages))
        return load

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Drops the content of `keys` from lower tiers and from loads in flight."""
        keys = list(keys)
        for key in keys:
            if key in self._by_key:
                self._by_key[key].is_void = True
        self._tiers.forget(keys)

    def clear(self) -> None:
        """Drops all content of lower tiers and loads in flight."""
        for load in self._by_key.values():
            load.is_void = True
            self._pool.release(load.shared)
            load.shared.clear()
        self._tiers.clear()

    def _place(self, key: PageKey) -> Place:
        place = self._tiers.find(key)
        assert place is not None, "held content was dropped"
        return place

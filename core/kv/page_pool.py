"""The pages of the KV cache: the free, used and cached ones, and the content hashes of full pages.

The pool owns page ids and the names of their contents. It knows nothing of requests and tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

PageKey = tuple[bytes, int]
"""Identifies a full page's content: the chained hash of its tokens, and the KV group whose layers wrote it."""


class PagePool:
    """Pages 0 .. num_pages - 1. Each is in exactly one of three states.

    - free: no block table refers to it, and it has no key;
    - in use: `num_refs[page]` block tables refer to it; if it has a key as well, it can be shared;
    - cached: no block table refers to it, but it has a key and can be found. The oldest is evicted first.

    Attributes:
        on_evict: called with each cached page that `allocate` is about to hand out, and with its key.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_refs = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages  # of each page, in use or cached
        self._pages: dict[PageKey, int] = {}  # the inverse of _keys
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; low ids leave first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.on_evict: Callable[[int, PageKey], None] | None = None

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, num_pages: int) -> list[int]:
        """Returns `num_pages` pages with one reference each: free ones first, then the oldest cached ones.

        Raises:
            ValueError: fewer are available; callers check `num_available` first.
        """
        free = self._free
        if num_pages > len(free) + len(self._cached):
            raise ValueError(f"asked for {num_pages} pages, {self.num_available} are available")
        pages = free[: -num_pages - 1 : -1]  # the last ones, the very last first
        del free[len(free) - len(pages) :]
        while len(pages) < num_pages:
            page, _ = self._cached.popitem(last=False)
            key = self._keys[page]
            if self.on_evict is not None and key is not None:
                self.on_evict(page, key)
            self._forget(page)
            pages.append(page)
        num_refs = self._num_refs
        for page in pages:
            num_refs[page] = 1
        return pages

    def has(self, key: PageKey) -> bool:
        """Returns True if a page in use or cached holds `key`'s content."""
        return key in self._pages

    def find(self, key: PageKey) -> int | None:
        """The page that holds `key`'s content, in use or cached. Adds no reference: see `share`."""
        return self._pages.get(key)

    def pages_of(self, keys: Iterable[PageKey]) -> list[int]:
        """The pages of `keys`; `find` must have found each."""
        return [self._pages[key] for key in keys]

    def num_cached_among(self, pages: Iterable[int]) -> int:
        """The number of cached pages in `pages`: sharing them takes them out of `num_available`."""
        num_refs = self._num_refs
        return sum(1 for page in pages if not num_refs[page])

    def touch(self, pages: Iterable[int]) -> None:
        """Moves those of `pages` that are cached to the end of the eviction order; others are in use."""
        for page in pages:
            if page in self._cached:
                self._cached.move_to_end(page)

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of `pages`, which are in use or cached."""
        for page in pages:
            if not self._num_refs[page]:
                del self._cached[page]
            self._num_refs[page] += 1

    def name(self, page: int, key: PageKey) -> None:
        """Gives a page in use its key. If another page has that key already, `find` keeps returning the other one."""
        if key not in self._pages and self._keys[page] is None:
            self._pages[key] = page
            self._keys[page] = key

    def rename(self, keys: Iterable[tuple[PageKey, PageKey]]) -> None:
        """Gives pages new keys, which no page has: pairs of (old, new)."""
        for old, new in keys:
            page = self._pages.pop(old)
            self._pages[new] = page
            self._keys[page] = new

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference to each of `pages`. Pages that become unused are evicted in this order."""
        num_refs, keys, free, cached = self._num_refs, self._keys, self._free, self._cached
        for page in pages:
            num_refs[page] -= 1
            if not num_refs[page]:
                if keys[page] is None:
                    free.append(page)
                else:
                    cached[page] = None

    def disown(self, keys: Iterable[PageKey]) -> None:
        """Makes the pages that hold `keys` unfindable, because their content cannot be trusted."""
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                self._forget(page)
                if not self._num_refs[page]:
                    del self._cached[page]
                    self._free.append(page)

    def drop_cached(self) -> bool:
        """Turns every cached page into a free one. Returns True if no page in use is findable either."""
        for page in self._cached:
            self._forget(page)
        self._free.extend(self._cached)
        self._cached.clear()
        return not self._pages

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._pages[key]
            self._keys[page] = None

    def check_invariants(self, expected_refs: Iterable[int] | None = None) -> None:
        """Asserts that every page is counted exactly once.

        `expected_refs` lists each page as often as block tables refer to it.
        """
        # Written with functions that loop in C: an engine with 200,000 pages runs this whenever it becomes idle.
        refs_of, key_of = self._num_refs.__getitem__, self._keys.__getitem__
        free = set(self._free)
        num_in_use = self.num_pages - self._num_refs.count(0)
        assert min(self._num_refs, default=0) >= 0, "a page was released more often than it was taken"
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(self._cached), "a page is free and cached"
        assert not any(map(refs_of, free)), "a page in use is free"
        assert not any(map(refs_of, self._cached)), "a page in use is marked as cached"
        assert len(free) + len(self._cached) + num_in_use == self.num_pages, (
            f"{len(free)} free + {len(self._cached)} cached + {num_in_use} in use pages do not make {self.num_pages}"
        )
        assert not any(map(key_of, free)), "a free page is findable"
        assert all(map(key_of, self._cached)), "a cached page is not findable"
        assert self.num_pages - self._keys.count(None) == len(self._pages), "a key has no page, or two"
        assert list(map(key_of, self._pages.values())) == list(self._pages), "pages and keys do not agree"
        if expected_refs is not None:
            counts = [0] * self.num_pages
            for page in expected_refs:
                counts[page] += 1
            assert counts == self._num_refs, "block tables and reference counts do not agree"

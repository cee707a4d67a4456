"""A lower tier for tests: pages of the host, the longest unused evicted first."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from quire.core.kv.page_loads import Place
from quire.core.kv.page_pool import PageKey


class HostPages:
    """Saves every page that the pool evicts, as long as some page of the host is not held."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._pages: OrderedDict[PageKey, int] = OrderedDict()
        self._held: Counter[PageKey] = Counter()
        self._dropped: dict[PageKey, int] = {}  # held, and not findable
        self.num_saved = 0

    def find(self, key: PageKey) -> Place | None:
        page = self._pages.get(key)
        return None if page is None else Place("host", page)

    def save(self, key: PageKey) -> Place | None:
        if key in self._pages or key in self._dropped:
            return None
        if not self._free:
            oldest = next((each for each in self._pages if not self._held[each]), None)
            if oldest is None:
                return None
            self._free.append(self._pages.pop(oldest))
        self._pages[key] = page = self._free.pop()
        self.num_saved += 1
        return Place("host", page)

    def hold(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._held[key] += 1
            self._pages.move_to_end(key)

    def let_go(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._held[key] -= 1
            if not self._held[key] and key in self._dropped:
                self._free.append(self._dropped.pop(key))

    def forget(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            if key in self._pages:
                page = self._pages.pop(key)
                if self._held[key]:
                    self._dropped[key] = page
                else:
                    self._free.append(page)

    def clear(self) -> None:
        self.forget(list(self._pages))

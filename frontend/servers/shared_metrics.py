"""Merges the metrics of several API servers into one page. No counter goes back when a server dies: its last counts
stay."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest

from quire.frontend.metrics.families import merged
from quire.frontend.servers.family import Collected, Family

ANSWER_SECONDS = 2.0
"""Limit of a page's wait for the servers' present counts; after it, the page shows their last ones."""


class SharedMetrics:
    """Keeps the latest snapshot of each server, and the sum of those of servers that ended.

    Args:
        ask: asks all servers for snapshots with a number; returns the servers' numbers.
        own: the families that the parent counts itself.
    """

    def __init__(self, ask: Callable[[int], set[int]], own: Callable[[], Iterable[Metric]]) -> None:
        self._ask = ask
        self._own = own
        self._latest: dict[int, list[Family]] = {}  # by server
        self._retired: list[Family] = []
        self._num_scrapes = 0
        self._missing: dict[int, set[int]] = {}  # servers that have not answered, by scrape
        self._answered: dict[int, asyncio.Event] = {}

    def on_snapshot(self, server: int, scrape_id: int, families: list[Family]) -> None:
        """Takes a server's counts."""
        self._latest[server] = families
        if (missing := self._missing.get(scrape_id)) is not None:
            missing.discard(server)
            if not missing:
                self._answered[scrape_id].set()

    def on_ended(self, server: int) -> None:
        """Handles a server's end. Its counts stay; its gauges do not."""
        counted = [each for each in self._latest.pop(server, []) if each.kind != "gauge"]
        metrics = merged(each.metric() for each in chain(self._retired, counted))
        self._retired = [Family.of(each) for each in metrics]
        for scrape_id, missing in self._missing.items():
            missing.discard(server)
            if not missing:
                self._answered[scrape_id].set()

    async def page(self) -> bytes:
        """The text of /metrics, with what all servers count now."""
        self._num_scrapes += 1
        scrape_id = self._num_scrapes
        self._answered[scrape_id] = answered = asyncio.Event()
        self._missing[scrape_id] = missing = self._ask(scrape_id)
        try:
            if missing:
                await asyncio.wait_for(answered.wait(), ANSWER_SECONDS)
        except TimeoutError:
            pass  # a server is busy, or about to end
        finally:
            del self._missing[scrape_id], self._answered[scrape_id]
        families = chain(*self._latest.values(), self._retired)
        return generate_latest(Collected(merged(chain(self._own(), (each.metric() for each in families)))))

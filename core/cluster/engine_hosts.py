"""The other hosts whose engines serve together with this host's, seen from node 0."""

import asyncio

from quire.core.cluster.coordinator import ClusterCoordinator, NodeLink
from quire.core.cluster.messages import CoordinatorStart, EngineNews
from quire.core.cluster.node_compatibility import name_ranks
from quire.core.errors import EngineError


class EngineHosts:
    """The nodes or servers with the other engines. They join from the first wait for them on.

    Subclasses handle their news. Use from one event loop; `close` may be called from another thread, as the program
    ends.

    Args:
        release: the reason at the end, for the other hosts.

    Attributes:
        address: of this host, for the others.
        has_engines_here: whether this host runs some of the engines, too.
    """

    def __init__(self, start: CoordinatorStart, *, release: str) -> None:
        self.address = start.facts.address
        self.has_engines_here = bool(start.facts.ranks)
        self._start = start
        self._release = release
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coordinator: ClusterCoordinator | None = None

    @property
    def missing(self) -> list[int]:
        """The numbers of engines whose hosts have not joined."""
        own = self._start.facts
        return self._coordinator.missing if self._coordinator else sorted(set(range(own.num_ranks)) - set(own.ranks))

    @property
    def waits_for(self) -> str | None:
        """A description of the hosts that have not joined; None if all have."""
        one = "server" if self._start.facts.division == "servers" else "host"
        return f"the {one} of engine {name_ranks(self.missing)}" if self.missing else None

    async def all_joined(self) -> None:
        """Waits until all hosts have joined.

        Raises:
            ConfigError: hosts cannot join at the address.
            EngineDeadError: this is closed meanwhile.
        """
        await self._open().all_joined()

    def close(self) -> None:
        """Releases all hosts, whose engines end. Idempotent."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close, coordinator)

    def _open(self) -> ClusterCoordinator:
        if self._coordinator is None:  # here, because it needs the running loop
            self._loop = asyncio.get_running_loop()
            self._coordinator = ClusterCoordinator(self._start, self)
        return self._coordinator

    def _close(self, coordinator: ClusterCoordinator) -> None:
        coordinator.close(self._release)

    def on_joined(self, node: NodeLink) -> None:
        """Handles a host that has joined, and has sent nothing yet."""

    def on_engine(self, node: NodeLink, news: EngineNews) -> None:
        """Handles a host's news of one of its engines."""

    def on_node_lost(self, node: NodeLink, error: EngineError) -> None:
        """Handles the loss of a host, and of its engines with it."""

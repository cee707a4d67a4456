"""Which hosts an engine's workers are on, and where its ranks meet."""

import os
import socket
from typing import Protocol

from quire.core.cluster.addresses import listen
from quire.core.cluster.head import ClusterHead
from quire.core.cluster.messages import HeadStart, StartWorkers
from quire.core.config.resolved import EngineConfig
from quire.core.wire.meeting import Meeting
from quire.executor.processes.remote_host import RemoteHost
from quire.executor.processes.worker_host import HostListener, LocalHost, WorkerHost


class Placement(Protocol):
    """Finds hosts for the workers of one engine."""

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        """The hosts of all workers, once they are there. None of them has started its workers.

        Args:
            factory: qualified name of a function that builds a worker in its process from (config, rank, init_method).
        """

    @property
    def waits_for(self) -> str | None:
        """What is missing before the engine can start; None if nothing is."""

    def close(self) -> None:
        """Frees what the hosts had in common. Call it after closing them. Idempotent."""


class OneHost:
    """All workers are on this host.

    Args:
        meeting: where they meet workers of other engines, too; None: they meet one another alone, in a file without a
            name, as the rings are.
    """

    waits_for = None

    def __init__(self, config: EngineConfig, meeting: Meeting | None = None) -> None:
        self._config = config
        self._meeting = meeting

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        """See `Placement.find_hosts`."""
        if self._meeting is None:
            fd = os.memfd_create("quire-rendezvous")
            self._meeting = Meeting(f"file:///proc/self/fd/{fd}", [fd])
        ranks = self._config.layout.ranks(self._config.place.data)
        return [LocalHost(self._config, ranks, factory, self._meeting, listener)]

    def close(self) -> None:
        """See `Placement.close`."""
        meeting, self._meeting = self._meeting, None
        for fd in [] if meeting is None else meeting.fds:
            os.close(fd)


class SeveralHosts:
    """The first workers are on this host, which is node 0, and the others on the nodes that join it."""

    def __init__(self, config: EngineConfig, start: HeadStart) -> None:
        self._config = config
        self._start = start
        self._facts = start.facts
        self._head: ClusterHead | None = None
        self._listener: socket.socket | None = None

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        """See `Placement.find_hosts`. Raises ConfigError if this host does not have the address."""
        self._head = ClusterHead(self._start)
        nodes = await self._head.all_joined()
        # The first rank is given the socket itself, so that nobody else takes its port meanwhile.
        self._listener = listen(self._facts.address)
        fd, place = self._listener.fileno(), f"tcp://{self._facts.address}:{self._listener.getsockname()[1]}"
        layout, here = self._config.layout, Meeting(f"{place}?listen_fd={fd}", [fd], self._facts.address)
        hosts: list[WorkerHost] = [LocalHost(self._config, layout.ranks_of_node(0), factory, here, listener)]
        for node in nodes:
            start = StartWorkers(self._config, layout.ranks_of_node(node.facts.ranks[0]), factory, place)
            hosts.append(RemoteHost(node, start, listener))
        return hosts

    @property
    def waits_for(self) -> str | None:
        """See `Placement.waits_for`."""
        return None if self._head is None else self._head.waits_for

    def close(self) -> None:
        """See `Placement.close`."""
        if self._head is not None:
            self._head.close("the engine has ended.")
            self._head = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

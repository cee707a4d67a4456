"""Which hosts an engine's workers are on, and where its ranks meet."""

import os
import socket
from typing import Protocol

from quire.core.cluster.addresses import interface_of, listen
from quire.core.cluster.head import ClusterHead
from quire.core.cluster.messages import HeadStart, StartWorkers
from quire.core.config.resolved import EngineConfig
from quire.executor.processes.remote_host import RemoteHost
from quire.executor.processes.worker_host import HostListener, LocalHost, Meeting, WorkerHost


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
    """All workers are on this host. They meet in a file without a name, as the rings are.

    Args:
        meeting_fd: of the file, where they meet workers of other engines, too; None: they meet one another alone.
    """

    waits_for = None

    def __init__(self, config: EngineConfig, meeting_fd: int | None = None) -> None:
        self._config = config
        self._meeting_fd = meeting_fd

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        """See `Placement.find_hosts`."""
        if self._meeting_fd is None:
            self._meeting_fd = os.memfd_create("quire-rendezvous")
        fd = self._meeting_fd
        meeting = Meeting(f"file:///proc/self/fd/{fd}", [fd])
        return [
            LocalHost(self._config, self._config.layout.ranks(self._config.place.data), factory, meeting, {}, listener)
        ]

    def close(self) -> None:
        """See `Placement.close`."""
        if self._meeting_fd is not None:
            os.close(self._meeting_fd)
            self._meeting_fd = None


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
        environment = cluster_environment(self._facts.address)
        self._head = ClusterHead(self._start)
        nodes = await self._head.all_joined()
        # The first rank is given the socket itself, so that nobody else takes its port meanwhile.
        self._listener = listen(self._facts.address)
        fd, meeting = self._listener.fileno(), f"tcp://{self._facts.address}:{self._listener.getsockname()[1]}"
        layout = self._config.layout
        hosts: list[WorkerHost] = [
            LocalHost(
                self._config,
                layout.ranks_of_node(0),
                factory,
                Meeting(f"{meeting}?listen_fd={fd}", [fd]),
                environment,
                listener,
            )
        ]
        for node in nodes:
            start = StartWorkers(self._config, layout.ranks_of_node(node.facts.ranks[0]), factory, meeting)
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


def cluster_environment(address: str) -> dict[str, str]:
    """Variables that have gloo and NCCL use the network interface of `address` alone.

    Raises:
        ConfigError: this host does not have the address.
    """
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

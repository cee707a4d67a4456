"""The hosts of an engine's workers, and the rendezvous of its ranks."""

import os
import socket
from typing import Protocol

from msgspec.structs import replace

from quire.core.cluster.addresses import listen
from quire.core.cluster.coordinator import ClusterCoordinator
from quire.core.cluster.messages import CoordinatorStart, StartWorkers
from quire.core.config.resolved import EngineConfig
from quire.core.wire.rendezvous import Rendezvous, endpoint_of, listening_rendezvous
from quire.executor.processes.remote_host import RemoteHost
from quire.executor.processes.worker_host import HostListener, LocalHost, WorkerHost


class WorkerPlacement(Protocol):
    """Finds hosts for the workers of one engine."""

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        """Returns the hosts of all workers, once they have joined. None of them has started its workers.

        Args:
            factory: qualified name of a function that builds a worker in its process from (config, rank, init_method).
        """

    @property
    def waits_for(self) -> str | None:
        """The missing condition for the engine's start; None if nothing is missing."""

    def close(self) -> None:
        """Frees resources that the hosts share. Call it after closing them. Idempotent."""


class OneHost:
    """All workers on this host.

    Args:
        rendezvous: the rendezvous with workers of other engines; None: the engine's own workers use an anonymous file.
    """

    waits_for = None

    def __init__(self, config: EngineConfig, rendezvous: Rendezvous | None = None) -> None:
        self._config = replace(config, is_led_from_afar=False)  # the engine logs its workers' reports once
        self._rendezvous = rendezvous

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        if self._rendezvous is None:
            fd = os.memfd_create("quire-rendezvous")
            self._rendezvous = Rendezvous(f"file:///proc/self/fd/{fd}", [fd])
        ranks = self._config.layout.ranks(self._config.place.data)
        return [LocalHost(self._config, ranks, factory, self._rendezvous, listener)]

    def close(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        for fd in [] if rendezvous is None else rendezvous.fds:
            os.close(fd)


class SeveralHosts:
    """Workers on this host, which is node 0, and on the nodes that join it; or only on such nodes.

    The nodes of an engine have consecutive numbers, and node 0 has workers of engine 0.
    """

    def __init__(self, config: EngineConfig, start: CoordinatorStart) -> None:
        self._config = config
        self._start = start
        self._facts = start.facts
        self._coordinator: ClusterCoordinator | None = None
        self._listener: socket.socket | None = None

    async def find_hosts(self, factory: str, listener: HostListener) -> list[WorkerHost]:
        """Waits for all nodes, and returns the hosts.

        Raises:
            ConfigError: this host does not have the address.
            EngineError: a node is lost meanwhile.
        """
        self._coordinator = ClusterCoordinator(self._start)
        nodes = await self._coordinator.all_joined()
        layout, data = self._config.layout, self._config.place.data
        first = data * layout.nodes  # number of the engine's first node
        hosts: list[WorkerHost] = []
        if first in self._facts.ranks:
            # The first rank inherits the socket itself, so that no other process takes its port meanwhile.
            self._listener = listen(self._facts.address)
            place, here = endpoint_of(self._listener), listening_rendezvous(self._listener, self._facts.address)
            hosts.append(LocalHost(self._config, layout.ranks_of_node(0, data), factory, here, listener))
        else:
            place = await nodes[0].open_rendezvous()
        for node in nodes:
            if node.loss is not None:  # lost meanwhile, before there was a listener
                raise node.loss
            ranks = layout.ranks_of_node(node.facts.ranks[0] - first, data)
            hosts.append(RemoteHost(node, StartWorkers(self._config, ranks, factory, place), listener))
        return hosts

    @property
    def waits_for(self) -> str | None:
        return None if self._coordinator is None else self._coordinator.waits_for

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close("the engine has ended.")
            self._coordinator = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

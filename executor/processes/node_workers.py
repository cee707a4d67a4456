"""The workers of an engine on a headless node: starts them at node 0's request, and forwards their messages.

    engine --ZeroMQ--> node --ring--> workers
    engine <--ZeroMQ-- node <--rings-- workers

The node's host is a `LocalHost`, as for workers beside their engine.
"""

import os
import socket

from msgspec.structs import replace

from quire.core.cluster.addresses import listen
from quire.core.cluster.messages import NodeStart, OpenRendezvous, Order, RendezvousOpened, ShareFile, StartWorkers
from quire.core.cluster.participant import Participant
from quire.core.errors import EngineError, EngineKilledError, PeerLostError
from quire.core.logging import get_logger
from quire.core.wire.protocol import FailureCause, FileCopy, encoder
from quire.core.wire.rendezvous import Rendezvous, endpoint_of, listening_rendezvous
from quire.executor.processes.worker_host import LocalHost

logger = get_logger(__name__)


class NodeWorkers:
    """The work of a node with workers. Implements `quire.core.cluster.node.NodeWork`."""

    def __init__(self, start: NodeStart, participant: Participant) -> None:
        self._start = start
        self._encoder = encoder()
        self._participant = participant
        self._host: LocalHost | None = None
        self._copies: list[int] = []  # descriptors
        self._listener: socket.socket | None = None  # the rendezvous of all workers of the engine, if it is here

    async def end(self) -> None:
        if self._host is not None:
            await self._host.close(hung=False)
        if self._listener is not None:
            self._listener.close()
        for fd in self._copies:
            os.close(fd)

    # ------------------------------------------------------------------------------------ messages of node 0

    def on_order(self, order: Order) -> None:
        match order:
            case OpenRendezvous():
                self._open_rendezvous()
            case StartWorkers():
                self._start_workers(order)
            case ShareFile():
                self._store_copy(order)

    def on_input(self, message: bytes) -> None:
        if self._host is not None:
            self._host.send(message)

    def _open_rendezvous(self) -> None:
        address = self._participant.facts.address
        self._listener = listen(address)
        self._participant.report(RendezvousOpened(endpoint_of(self._listener)))

    def _start_workers(self, order: StartWorkers) -> None:
        config = replace(
            order.config,
            spec=replace(order.config.spec, path=self._start.folder),
            logging=self._start.logging,
            is_led_from_afar=True,
        )
        logger.info("this node starts %s", ", ".join(f"worker {rank}" for rank in order.ranks))
        address = self._participant.facts.address
        rendezvous = Rendezvous(order.init_method, address=address)
        if (
            self._listener is not None
        ):  # the first worker inherits the socket itself, so that no other process takes its port
            rendezvous = listening_rendezvous(self._listener, address)
        self._host = LocalHost(config, order.ranks, order.factory, rendezvous, self)
        self._host.start()

    def _store_copy(self, file: ShareFile) -> None:
        """Stores a copy of the file in memory, and sends the workers its path."""
        fd = os.memfd_create("quire-copy")
        self._copies.append(fd)
        with open(fd, "wb", closefd=False) as copy:
            copy.write(file.data)
        if self._host is not None:
            self._host.send(self._encoder.encode(FileCopy(file.path, f"/proc/{os.getpid()}/fd/{fd}")))

    # ----------------------------------------------------------------------------------- messages of workers

    def on_output(self, message: bytes) -> None:
        self._participant.send_output(message)

    def on_lost(self, error: EngineError) -> None:
        self._participant.leave(str(error), _cause_of(error))


def _cause_of(error: EngineError) -> FailureCause:
    match error:
        case PeerLostError():
            return "peer"
        case EngineKilledError():
            return "killed"
    return "other"

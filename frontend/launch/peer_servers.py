"""Several servers whose engines share experts: the first server announces the rendezvous of their workers, and the ends
of epochs.

Each server starts and watches its own engines. Before it starts one, it asks the first server (`EngineWanted`), which
answers with the rendezvous (`RendezvousReady`), and later reports the end of any of the engines (`EpochEnded`).
"""

import asyncio
from functools import partial

from quire.core.cluster.coordinator import ClusterCoordinator, NodeLink
from quire.core.cluster.engine_hosts import EngineHosts
from quire.core.cluster.messages import (
    CoordinatorStart,
    EngineNews,
    EngineWanted,
    EpochEnded,
    Order,
    RendezvousFailed,
    RendezvousReady,
    WaitsFor,
)
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.cluster.participant import Participant
from quire.core.errors import ConfigError, EngineError, PeerLostError, QuireError
from quire.core.logging import get_logger
from quire.core.wire.channel import CurveKeys
from quire.frontend.launch.shared_experts import Epoch, EpochCoordinator, RemoteRendezvous

logger = get_logger(__name__)

_GIVEN_UP = "this server has given up its engines."


class CoordinatorServer(EngineHosts):
    """The server with engine 0, which starts epochs. The other servers join from the first `wait_for_hosts` on."""

    has_other_hosts = True

    def __init__(self, start: CoordinatorStart) -> None:
        super().__init__(start, release="its engines have ended.")
        self._epochs = EpochCoordinator(self)
        self._servers: set[NodeLink] = set()
        self._answers: dict[tuple[NodeLink, int], asyncio.Task[None]] = {}  # by server, and number of the engine
        self._is_closed = False

    async def wait_for_hosts(self, number: int) -> None:
        """Waits for all servers. Raises ConfigError if servers cannot join at the address."""
        self._open()
        await self._epochs.wait_for_hosts(number)

    def epoch_of(self, number: int) -> Epoch:
        return self._epochs.epoch_of(number)

    def retire(self) -> None:
        """Closes the coordinator. The other servers wait for the next one with engine 0."""
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self._epochs.close()
        super().close()

    def _open(self) -> ClusterCoordinator:
        if self._is_closed:
            raise PeerLostError(_GIVEN_UP)
        return super()._open()

    def _close(self, coordinator: ClusterCoordinator) -> None:
        for answer in self._answers.values():
            answer.cancel()
        super()._close(coordinator)

    # ---------------------------------------------------------------------------------------------- the other servers

    def on_joined(self, node: NodeLink) -> None:
        self._servers.add(node)
        self._send_what_is_missing()

    def on_engine(self, node: NodeLink, news: EngineNews) -> None:
        """Answers a server that is about to start one of its engines."""
        if not isinstance(news, EngineWanted) or news.data not in node.facts.ranks:
            return
        if (before := self._answers.get((node, news.data))) is not None:
            before.cancel()
        self._answers[node, news.data] = asyncio.create_task(self._answer(node, news.data))

    def on_node_lost(self, node: NodeLink, error: EngineError) -> None:
        """Ends the epoch, because a server is lost, and no other process would end its engines' peers."""
        self._servers.discard(node)
        for place in [place for place in self._answers if place[0] is node]:
            self._answers.pop(place).cancel()
        self._epochs.end(PeerLostError(str(error)))
        self._send_what_is_missing()

    def _send_what_is_missing(self) -> None:
        for server in self._servers:
            server.tell(WaitsFor(self.waits_for))

    async def _answer(self, server: NodeLink, number: int) -> None:
        try:
            await self.wait_for_hosts(number)
            epoch = self.epoch_of(number)
            method = await epoch.port.for_remote_engine()
        except (OSError, EngineError, ConfigError) as error:
            logger.error("engine %d cannot be started on another host: %s", number, error)
            server.tell(RendezvousFailed(number, f"the server of engine 0 cannot open a rendezvous: {error}"))
            return
        assert method is not None  # this host has the port
        server.tell(RendezvousReady(number, method))
        epoch.add(_PeerEngine(server, number))


class _PeerEngine:
    """An engine that another server has started, and watches."""

    def __init__(self, server: NodeLink, number: int) -> None:
        self._server = server
        self._number = number

    def end(self, reason: PeerLostError) -> None:
        self._server.tell(EpochEnded(self._number, str(reason)))


class ParticipantServer:
    """A server without engine 0. It joins the coordinator at the first `wait_for_hosts`, and again whenever it has lost
    it; its engines end meanwhile.

    Args:
        head: name or address, and port, at which servers join.
        keys: of the join token.
        facts: this server's.
    """

    has_other_hosts = True

    def __init__(self, head: str, keys: CurveKeys, facts: NodeFacts) -> None:
        self._coordinator = head
        self._keys = keys
        self._facts = facts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attending: asyncio.Task[None] | None = None
        self._participant: Participant | None = None  # that node 0 has granted
        self._missing: str | None = None  # as node 0 last reported
        self._asked: dict[int, asyncio.Future[RendezvousReady]] = {}  # by number of the engine
        self._epochs: dict[int, Epoch] = {}  # of the engine alone: this server does not know the others'
        self._is_closed = False

    @property
    def waits_for(self) -> str | None:
        return "the server of engine 0" if self._participant is None else self._missing

    async def wait_for_hosts(self, number: int) -> None:
        """Waits for all servers. Raises ConfigError if node 0 refuses this server as it was started."""
        if self._is_closed:
            raise PeerLostError(_GIVEN_UP)
        self._asked[number] = asked = asyncio.get_running_loop().create_future()
        if self._attending is None or self._attending.done():
            self._loop = asyncio.get_running_loop()
            self._attending = asyncio.create_task(self._attend())
        if self._participant is not None:
            self._participant.report(EngineWanted(number))
        await asked

    def epoch_of(self, number: int) -> Epoch:
        return self._epochs[number]

    def retire(self) -> None:
        """Leaves the cluster. The others' engines end, and wait for the next server with these ranks."""
        self.close()

    def close(self) -> None:
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():  # perhaps from another thread, as the program ends
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._participant is not None:
            self._participant.leave("its engines have ended.")
        elif self._attending is not None:
            self._attending.cancel()
        self._fail_asked(PeerLostError(_GIVEN_UP))

    # -------------------------------------------------------------------------------------------------- the first one

    async def _attend(self) -> None:
        """Joins again and again, until `close` or a failure, which is raised in waiting calls."""
        try:
            while not self._is_closed:
                await self._be_member()
        except ConfigError as error:
            self._fail_asked(error)
        except Exception as error:
            logger.exception("this server has left the cluster")
            self._fail_asked(PeerLostError(f"the server of engine 0 cannot be reached: {error}"))

    async def _be_member(self) -> None:
        """Takes part in one session. Raises ConfigError if node 0 refuses this server as it was started."""
        participant = Participant(self._coordinator, self._keys, self._facts, self)
        try:
            reason = await participant.run(partial(self._on_joined, participant))
        finally:
            self._participant = None
            participant.close()
        if not self._is_closed:
            logger.warning("the server of engine 0 is lost: %s This server waits for it.", reason)
            for epoch in self._epochs.values():
                epoch.end(PeerLostError(f"the server of engine 0 is lost: {reason}"))

    def _on_joined(self, participant: Participant) -> None:
        self._participant = participant
        for number, asked in self._asked.items():
            if not asked.done():
                participant.report(EngineWanted(number))

    def _fail_asked(self, error: QuireError) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)

    def on_input(self, message: bytes) -> None:
        """Ignores the message: workers' messages stay within their engine."""

    def on_order(self, order: Order) -> None:
        match order:
            case WaitsFor(what):
                self._missing = what
            case RendezvousReady(data, init_method):
                asked = self._asked.get(data)
                if asked is not None and not asked.done() and self._participant is not None:
                    self._epochs[data] = Epoch(RemoteRendezvous(init_method, self._participant.facts.address))
                    asked.set_result(order)
            case RendezvousFailed(data, reason):
                asked = self._asked.get(data)
                if asked is not None and not asked.done():
                    asked.set_exception(PeerLostError(reason))
            case EpochEnded(data, reason):
                if (epoch := self._epochs.get(data)) is not None:
                    epoch.end(PeerLostError(reason))

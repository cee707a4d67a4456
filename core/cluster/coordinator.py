"""Node 0's end of a cluster: admits or refuses nodes that join, and watches them."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from quire.core.cluster.check_messages import CHECK
from quire.core.cluster.heartbeat import BEAT_SECONDS, SILENCE_SECONDS, HeartbeatMonitor
from quire.core.cluster.messages import (
    WORKER,
    Beat,
    CoordinatorStart,
    Ended,
    EngineEnded,
    EngineNews,
    EngineStarted,
    EngineWanted,
    FromNode,
    Join,
    Joined,
    JoinRefused,
    NodeLost,
    OpenRendezvous,
    RendezvousOpened,
    ToNode,
    control,
)
from quire.core.cluster.node_compatibility import ADDRESS_FLAGS, NodeFacts, name_ranks, obstacle
from quire.core.cluster.peer_clock import PeerClock
from quire.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineKilledError,
    HostLostError,
    PeerLostError,
)
from quire.core.logging import get_logger
from quire.core.wire.channel import Channel, bind_router
from quire.core.wire.protocol import FailureCause

logger = get_logger(__name__)

REMINDER_SECONDS = 10.0
SELDOM_SECONDS = 60.0


class NodeListener(Protocol):
    """Receives the messages of one node's workers."""

    def on_output(self, message: bytes) -> None:
        """Handles a `WorkerOutput` from a worker of the node."""

    def on_lost(self, error: EngineError) -> None:
        """Handles the loss of the node. HostLostError: the node has ended, hangs, or is unreachable. PeerLostError: its
        workers have failed, or lost those of another node. No call follows."""


class ClusterListener(Protocol):
    """Receives the joins, the losses and the news of all nodes of a cluster."""

    def on_joined(self, node: "NodeLink") -> None:
        """Handles a node that has joined, and has sent nothing yet."""

    def on_engine(self, node: "NodeLink", news: EngineNews) -> None:
        """Handles a node's news of one of its engines."""

    def on_node_lost(self, node: "NodeLink", error: EngineError) -> None:
        """Handles the loss of a node, as `NodeListener.on_lost` does."""


class NodeLink:
    """Node 0's end of the connection to one node that has joined.

    Attributes:
        listener: hears the node's workers from now on.
        loss: why the node is lost.
    """

    def __init__(self, facts: NodeFacts, identity: bytes, channel: Channel) -> None:
        self.facts = facts
        self.listener: NodeListener | None = None
        self.heartbeat = HeartbeatMonitor()
        self.is_gone = False
        self.loss: EngineError | None = None
        self.rivals: dict[bytes, NodeFacts] = {}  # by identity: they have the same number
        self._identity = identity
        self._channel = channel
        self._opened: asyncio.Future[str] | None = None

    async def open_rendezvous(self) -> str:
        """Asks the node to open the rendezvous of all workers of the engine. Returns its address, for
        `RankGroups.join`.

        Raises:
            EngineError: the node is lost meanwhile.
        """
        self._opened = asyncio.get_running_loop().create_future()
        self.tell(OpenRendezvous())
        return await self._opened

    def on_opened(self, init_method: str) -> None:
        """Takes the node's answer to `OpenRendezvous`."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(init_method)

    def on_lost(self, error: EngineError) -> None:
        """Marks the node as lost, and reports the error to its listener and to a waiting `open_rendezvous`."""
        self.is_gone = True
        self.loss = error
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(error)
        if self.listener is not None:
            self.listener.on_lost(error)

    def tell(self, message: ToNode) -> None:
        """Sends a message to the node, unless it is gone."""
        if not self.is_gone:
            self._channel.send([self._identity, *control(message)])

    def send_to_workers(self, message: bytes) -> None:
        """Sends a `WorkerInput` to all workers of the node, unless it is gone."""
        if not self.is_gone:
            self._channel.send([self._identity, WORKER, message])


class _Seldom:
    """Limits a log line to one a minute."""

    def __init__(self) -> None:
        self._said_at = -SELDOM_SECONDS

    def is_due(self) -> bool:
        """Returns True if the line may be logged now."""
        now = time.monotonic()
        if now - self._said_at < SELDOM_SECONDS:
            return False
        self._said_at = now
        return True


class ClusterCoordinator:
    """Admits nodes until all have joined, and watches them until `close`. Use from one event loop.

    Args:
        listener: receives news of all nodes; None: nobody does.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, start: CoordinatorStart, listener: ClusterListener | None = None) -> None:
        self._listener = listener
        self._facts = start.facts
        self._elsewhere = set(start.elsewhere)
        self._address = start.address
        self._nodes: dict[bytes, NodeLink] = {}  # by identity
        self._waiting: set[asyncio.Future[None]] = set()  # for nodes
        self._said = (0.0, "")  # the last reminder, and when: CLOCK_MONOTONIC seconds
        self._decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
        self._clocks: dict[bytes, PeerClock] = {}  # by identity, of nodes that are not judged yet
        self._num_strangers = 0
        self._strangers, self._unread = _Seldom(), _Seldom()
        try:
            self._channel = bind_router(
                f"tcp://{start.address}", start.keys, self._on_frames, self._on_stranger, asks_for_senders=True
            )
        except zmq.ZMQError as error:
            address, port = ADDRESS_FLAGS[start.facts.division]
            raise ConfigError(
                f"Nodes cannot join at {start.address}: {error}. {address} must be an address of this host, and "
                f"{port} a free port."
            ) from None
        self._beating = asyncio.create_task(self._beat())

    @property
    def missing(self) -> list[int]:
        """The ranks whose nodes have not joined."""
        there = {rank for node in self._nodes.values() for rank in node.facts.ranks}
        return sorted(set(range(self._facts.num_ranks)) - there - set(self._facts.ranks) - self._elsewhere)

    @property
    def waits_for(self) -> str | None:
        """A description of the missing nodes; None if all have joined."""
        if not self.missing:
            return None
        one = "node" if self._facts.division == "workers" else "engine"
        return f"{one} {name_ranks(self.missing)} of {self._facts.num_ranks}"

    async def all_joined(self) -> list[NodeLink]:
        """Waits until all other nodes have joined, and returns them in the order of their ranks. Logs a reminder now
        and then.

        Raises:
            EngineDeadError: this is closed meanwhile.
        """
        await self._wait_while(lambda: bool(self.missing))
        return sorted(self._nodes.values(), key=lambda node: node.facts.ranks)

    async def node_with(self, rank: int) -> NodeLink:
        """Waits for the node with a rank. Raises as `all_joined` does."""
        await self._wait_while(lambda: rank in self.missing)
        return next(node for node in self._nodes.values() if rank in node.facts.ranks)

    async def _wait_while(self, is_missing: Callable[[], bool]) -> None:
        """Waits while `is_missing` is true. Raises EngineDeadError if the coordinator is closed meanwhile."""
        while is_missing():
            self._remind()
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                async with asyncio.timeout(REMINDER_SECONDS):
                    await changed
            except TimeoutError:
                continue
            finally:
                self._waiting.discard(changed)

    def _remind(self) -> None:
        """Logs what is missing, once for all waiting calls."""
        said_at, said = self._said
        what, now = f"waiting at {self._address} for {self.waits_for}", time.monotonic()
        if what != said or now - said_at >= REMINDER_SECONDS:
            self._said = now, what
            logger.info("%s", what)

    def close(self, reason: str) -> None:
        """Releases all nodes, which then wait for another engine. Idempotent."""
        for future in self._waiting:
            if not future.done():
                future.set_exception(EngineDeadError(f"Nobody joins any more: {reason}"))
        self._beating.cancel()
        for node in self._nodes.values():
            node.tell(Ended(reason))
            node.is_gone = True
        self._nodes.clear()
        self._channel.close(linger_ms=500)

    # ----------------------------------------------------------------------------------------------------- messages

    def _on_frames(self, frames: list[bytes]) -> None:
        identity, *said = frames
        node = self._nodes.get(identity)
        if node is not None:
            node.heartbeat.on_message()
        try:
            kind, payload = said
            message = None if kind in (CHECK, WORKER) else self._decoder.decode(payload)
        except (ValueError, msgspec.DecodeError) as error:
            self._on_unreadable(identity, node, error)
            return
        if kind == WORKER and node is not None and node.listener is not None:
            node.listener.on_output(payload)
        match message:
            case None:  # a `quire check-cluster`, which should have met another one, gives up by itself
                pass
            case Join() as join:
                self._on_join(identity, join)
            case Beat():
                self._on_beat(identity, node)
            case NodeLost(reason, cause):
                if node is not None:
                    self._lose(identity, reason, cause)
            case RendezvousOpened(init_method):
                if node is not None:
                    node.on_opened(init_method)
            case EngineStarted() | EngineEnded() | EngineWanted() as news:
                if node is not None and self._listener is not None:
                    self._listener.on_engine(node, news)

    def _on_join(self, identity: bytes, join: Join) -> None:
        facts = join.facts
        if identity in self._nodes:  # it has not seen our answer yet
            return
        clock = self._clocks.setdefault(identity, PeerClock())
        clock.hear(join.clock)
        if clock.may_have_waited:
            return
        del self._clocks[identity]
        problem = obstacle(self._facts, facts, clock.seconds_apart)
        if problem is None and self._elsewhere & set(facts.ranks):
            problem = "It has workers of another engine; give all nodes one --master-port and --data-parallel-size."
        if problem is not None:
            self._refuse(identity, facts, problem)
            return
        if (other := self._node_of(facts.ranks)) is not None:
            other.rivals[identity] = facts  # until the other one shows whether it lives
            return
        self._nodes[identity] = node = NodeLink(facts, identity, self._channel)
        node.tell(Joined())
        logger.info("%s has joined", facts)
        if self._listener is not None:
            self._listener.on_joined(node)
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def _on_beat(self, identity: bytes, node: NodeLink | None) -> None:
        if node is None:
            self._channel.send([identity, *control(Ended("node 0 does not know this node (any more)."))])
            return
        for rival, facts in node.rivals.items():
            self._refuse(rival, facts, f"There is already {node.facts}; give each node a number of its own.")
        node.rivals.clear()

    def _refuse(self, identity: bytes, facts: NodeFacts, reason: str) -> None:
        logger.error("%s is refused: %s", facts, reason)
        self._channel.send([identity, *control(JoinRefused(reason))])

    def _on_unreadable(self, identity: bytes, node: NodeLink | None, error: Exception) -> None:
        reason = (
            f"It says what node 0 cannot read ({error}), as another version of Quire may; install one version on all "
            "nodes."
        )
        if node is not None:
            self._lose(identity, reason, "other")
            return
        if self._unread.is_due():
            logger.error("a node at %s is refused: %s", self._channel.sender or "an unknown address", reason)
        self._channel.send([identity, *control(JoinRefused(reason))])

    def _node_of(self, ranks: list[int]) -> NodeLink | None:
        return next((node for node in self._nodes.values() if set(node.facts.ranks) & set(ranks)), None)

    def _on_stranger(self) -> None:
        """Logs that a peer without the join token was rejected, at most once a minute: a port scanner must not fill the
        log."""
        self._num_strangers += 1
        if not self._strangers.is_due():
            return
        logger.warning(
            "somebody without the join token was turned away at %s (%d so far); if it is a node, give it the same "
            "QUIRE_JOIN_TOKEN",
            self._address,
            self._num_strangers,
        )

    # ------------------------------------------------------------------------------------------------------- watching

    async def _beat(self) -> None:
        while True:
            for identity, node in list(self._nodes.items()):
                node.tell(Beat())
                if node.heartbeat.is_lost():
                    silent = f"it has been silent for {SILENCE_SECONDS} s, so it hangs or is cut off."
                    self._lose(identity, silent, "host")
            await asyncio.sleep(BEAT_SECONDS)

    def _lose(self, identity: bytes, reason: str, cause: FailureCause) -> None:
        node = self._nodes.pop(identity)
        logger.error("%s is lost: %s", node.facts, reason)
        node.tell(Ended("node 0 takes this node for lost."))
        name = str(node.facts)
        kinds = {"host": HostLostError, "peer": PeerLostError, "killed": EngineKilledError}
        kind = kinds.get(cause, EngineError)
        error = kind(f"{name[0].upper()}{name[1:]} is lost: {reason}")
        node.on_lost(error)
        if self._listener is not None:
            self._listener.on_node_lost(node, error)

"""A node's end of a cluster: joins the coordinator (node 0), carries out its orders, and notices its end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq
from msgspec.structs import replace

from quire.core.cluster.coordinator_connection import CoordinatorConnection
from quire.core.cluster.heartbeat import BEAT_SECONDS, SILENCE_SECONDS, HeartbeatMonitor
from quire.core.cluster.messages import (
    WORKER,
    Beat,
    Ended,
    EndEngine,
    EngineNews,
    EpochEnded,
    FromNode,
    Join,
    Joined,
    JoinRefused,
    NodeLost,
    OpenRendezvous,
    Order,
    RendezvousFailed,
    RendezvousOpened,
    RendezvousReady,
    ShareFile,
    StartEngine,
    StartWorkers,
    ToNode,
    WaitsFor,
    control,
)
from quire.core.cluster.node_compatibility import ADDRESS_FLAGS, NodeFacts
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.core.wire.channel import Channel, CurveKeys, connect_dealer
from quire.core.wire.protocol import FailureCause

logger = get_logger(__name__)

FIRST_JOIN_SECONDS, JOIN_SECONDS = 0.05, 1.0
"""Between two attempts: at first, and at most. The first one of all comes before there is a connection."""
REMINDER_SECONDS = 10.0
MANY_REBUFFS = 5
"""Fewer handshakes may have failed because node 0 ended meanwhile."""


class ParticipantListener(Protocol):
    """Carries out the coordinator's orders."""

    def on_order(self, order: Order) -> None:
        """Carries out an order of node 0. An exception ends the session, and both sides log the reason."""

    def on_input(self, message: bytes) -> None:
        """Passes a `WorkerInput` to all workers of this node. Fails as `on_order` does."""


class Participant:
    """One session in a cluster, from joining to its end. Use from one event loop.

    Args:
        head: node 0's name or address, and port. A name is looked up until there is a connection, because a name server
            may know it late, and node 0 may come back at another address.
        keys: of the join token.
        facts: this node's. Its address may be a name, and its interface may come up later. Without an address, it has
            the one from which packets go to node 0.
    """

    def __init__(self, head: str, keys: CurveKeys, facts: NodeFacts, listener: ParticipantListener) -> None:
        self._coordinator = head
        self._facts = facts
        self._listener = listener
        self._decoder: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
        self._heartbeat = HeartbeatMonitor()
        self._num_rebuffs = 0  # since the last reminder
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channel: Channel = connect_dealer(None, keys, self._on_frames, on_rebuff=self._on_rebuff)
        self._connection = CoordinatorConnection(head, self._channel, facts.address)

    @property
    def facts(self) -> NodeFacts:
        """This node's facts. They include its address once it has joined."""
        return replace(self._facts, address=self._connection.own_address)

    async def run(self, on_joined: Callable[[], None] = lambda: None) -> str:
        """Joins, and returns the reason when the session has ended.

        Args:
            on_joined: called when node 0 has taken this node in.

        Raises:
            ConfigError: node 0 refuses this node as it was started.
        """
        await self._join()
        if not self._ended.done():
            logger.info("%s has joined node 0 at %s", self.facts, self._coordinator)
            on_joined()
        while not self._ended.done():
            if self._heartbeat.is_lost():
                self._ended.set_result(f"node 0 has been silent for {SILENCE_SECONDS} s.")
                break
            self._try_to_send(Beat())
            await asyncio.wait([self._ended], timeout=BEAT_SECONDS)
        return self._ended.result()

    async def _join(self) -> None:
        """Returns when node 0 has admitted this node, or the session has ended. Logs a reminder now and then."""
        said_at = time.monotonic() - REMINDER_SECONDS + 2 * JOIN_SECONDS  # nothing if node 0 is there at once
        pause = FIRST_JOIN_SECONDS
        following = asyncio.create_task(self._connection.follow())
        news: list[asyncio.Future[Any]] = [self._joined, self._ended, following]
        try:
            while not any(each.done() for each in news):
                self._connection.is_connected = self._try_to_send(Join(self.facts, time.time()))
                await asyncio.wait(news, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                pause = min(2 * pause, JOIN_SECONDS)
                if time.monotonic() - said_at >= REMINDER_SECONDS and not self._joined.done():
                    said_at = time.monotonic()
                    logger.warning("%s", self._what_is_missing())
            for each in (following, self._joined):
                if each.done():
                    each.result()
        finally:
            following.cancel()

    def send_output(self, message: bytes) -> None:
        """Sends a `WorkerOutput` to node 0. Without a connection the message is lost, and the session ends soon."""
        with contextlib.suppress(zmq.Again):
            self._channel.send([WORKER, message])

    def report(self, news: EngineNews | RendezvousOpened) -> None:
        """Reports news of an engine, or the address of the rendezvous, to node 0."""
        self._try_to_send(news)

    def leave(self, reason: str, cause: FailureCause = "other") -> None:
        """Reports to node 0 that this node stops, and makes `run` return. Does nothing when the session has ended."""
        if not self._ended.done():
            self._try_to_send(NodeLost(reason, cause))
            self._ended.set_result(reason)

    def on_failure(self, error: Exception) -> None:
        """Ends the session because an order failed: node 0 would wait for its result."""
        if not isinstance(error, OSError | ConfigError):
            logger.error("an order of node 0 could not be carried out", exc_info=error)
        self.leave(f"it cannot do what node 0 says: {error}")

    def close(self) -> None:
        """Closes the connection; the message of `leave` gets 0.5 s to be sent. Idempotent."""
        self._channel.close(linger_ms=500)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heartbeat.on_message()
        if self._ended.done():
            return
        try:
            self._hear(frames)
        except Exception as error:
            self.on_failure(error)

    def _hear(self, frames: list[bytes]) -> None:
        kind, payload = frames
        if kind == WORKER:
            self._listener.on_input(payload)
            return
        match self._decoder.decode(payload):
            case Joined():
                if not self._joined.done():
                    self._joined.set_result(None)
            case JoinRefused(reason):
                if not self._joined.done():
                    self._joined.set_exception(ConfigError(f"Node 0 refuses this node: {reason}"))
            case Ended(reason):
                self._ended.set_result(reason)
            case StartWorkers() | ShareFile() | OpenRendezvous() as order:
                self._listener.on_order(order)
            case (
                StartEngine()
                | EndEngine()
                | RendezvousReady()
                | RendezvousFailed()
                | EpochEnded()
                | WaitsFor() as order
            ):
                self._listener.on_order(order)

    def _try_to_send(self, message: FromNode) -> bool:
        """Sends a message. Returns False if there is no connection."""
        with contextlib.suppress(zmq.Again):
            return self._channel.send(control(message))
        return False

    def _on_rebuff(self) -> None:
        self._num_rebuffs += 1

    def _what_is_missing(self) -> str:
        num_rebuffs, self._num_rebuffs = self._num_rebuffs, 0
        if num_rebuffs >= MANY_REBUFFS:
            return (
                f"what listens at {self._coordinator} does not know this node's join token; "
                "set the same QUIRE_JOIN_TOKEN on all nodes"
            )
        if self._connection.own_obstacle is not None:
            return self._connection.own_obstacle
        address, port = ADDRESS_FLAGS[self.facts.division]
        return f"node 0 does not answer at {self._connection} yet; see {address} and {port}"

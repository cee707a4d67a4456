"""Another node's end of a check whether hosts can serve together. It announces itself, and runs the measurements that
node 0 asks for."""

import asyncio
import contextlib
import time
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from quire.core.cluster.check_messages import (
    CHECK,
    CheckStart,
    Farewell,
    FromChecked,
    Hello,
    Measure,
    Measured,
    ToChecked,
    Verdict,
    checking,
)
from quire.core.cluster.coordinator_connection import CoordinatorConnection
from quire.core.cluster.participant import MANY_REBUFFS
from quire.core.cluster.probe import Probe
from quire.core.errors import EngineError
from quire.core.logging import get_logger
from quire.core.wire.channel import connect_dealer

logger = get_logger(__name__)

HELLO_SECONDS, SILENCE_SECONDS = 1.0, 10.0


class CheckParticipant:
    """Another node's end of one check. Use from one event loop."""

    def __init__(self, start: CheckStart) -> None:
        self._start = start
        self._probe: Probe | None = None  # once this host's address is known
        self._decoder: msgspec.msgpack.Decoder[ToChecked] = msgspec.msgpack.Decoder(ToChecked)
        self._verdict: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._heard_at: float | None = None
        self._num_rebuffs = 0
        self._measuring: set[asyncio.Task[None]] = set()
        self._channel = connect_dealer(None, start.keys, self._on_frames, on_rebuff=self._on_rebuff)
        self._connection = CoordinatorConnection(start.head, self._channel, start.report.facts.address)

    async def run(self, patience: float) -> list[str]:
        """Takes part until node 0 ends the check. Returns the problems of the cluster.

        Args:
            patience: seconds to wait for node 0's first answer.

        Raises:
            ConfigError: this host does not have its address.
            EngineError: node 0 does not answer (any more).
        """
        following = asyncio.create_task(self._connection.follow())
        try:
            return await self._take_part(patience, following)
        finally:
            following.cancel()

    async def _take_part(self, patience: float, following: asyncio.Task[None]) -> list[str]:
        logger.info("waiting for node 0 at %s, %.0f s at most", self._start.head, patience)
        started_at = time.monotonic()
        while not self._verdict.done():
            now = time.monotonic()
            if self._heard_at is None and (self._num_rebuffs >= MANY_REBUFFS or now - started_at > patience):
                raise EngineError(self._why_nobody_answers(patience))
            if self._heard_at is not None and now - self._heard_at > SILENCE_SECONDS:
                raise EngineError(f"Node 0 at {self._start.head} has been silent for {SILENCE_SECONDS:.0f} s.")
            self._say_hello()
            news: list[asyncio.Future[Any]] = [self._verdict, following]
            await asyncio.wait(news, timeout=HELLO_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        return self._verdict.result()

    def _say_hello(self) -> None:
        address = self._connection.own_address
        if not address:
            return
        if self._probe is None:
            self._probe = Probe(address, self._start.keys)
        report = replace(self._start.report, facts=replace(self._start.report.facts, address=address))
        self._connection.is_connected = self._send(Hello(report, self._probe.endpoint, time.time()))

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        for task in self._measuring:
            task.cancel()
        if self._probe is not None:
            self._probe.close()
        self._channel.close(linger_ms=500)

    def _why_nobody_answers(self, patience: float) -> str:
        if self._num_rebuffs:
            return (
                f"What listens at {self._start.head} does not know this node's join token; set the same "
                "QUIRE_JOIN_TOKEN on all nodes."
            )
        if self._connection.own_obstacle is not None:
            return f"{self._connection.own_obstacle}. Waited {patience:g} s."
        return (
            f"No `quire check-cluster` of node 0 answered at {self._connection} within {patience:g} s; see "
            "--master-addr and --master-port, and whether a firewall or a server that already runs is there."
        )

    def _on_frames(self, frames: list[bytes]) -> None:
        kind, payload = frames
        if kind != CHECK:
            return
        self._heard_at = time.monotonic()
        match self._decoder.decode(payload):
            case Measure() as measure:
                task = asyncio.create_task(self._measure(measure))
                self._measuring.add(task)
                task.add_done_callback(self._measuring.discard)
            case Verdict(problems):
                if not self._verdict.done():
                    self._send(Farewell())
                    self._verdict.set_result(problems)

    def _on_rebuff(self) -> None:
        self._num_rebuffs += 1

    async def _measure(self, asked: Measure) -> None:
        assert self._probe is not None  # node 0 has seen its endpoint
        self._send(Measured(asked.number, await self._probe.measure(asked.quantity, asked.endpoint)))

    def _send(self, message: FromChecked) -> bool:
        """Sends a message. Returns False if there is no connection."""
        with contextlib.suppress(zmq.Again):
            return self._channel.send(checking(message))
        return False

"""Node 0's end of a check whether hosts can serve together: it questions all nodes, and has each pair measure its
link."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import NamedTuple

import msgspec
import zmq

from quire.core.cluster.check_messages import (
    CHECK,
    CheckStart,
    Farewell,
    FromChecked,
    Hello,
    Measure,
    Measured,
    NodeReport,
    Quantity,
    ToChecked,
    Verdict,
    Welcome,
    checking,
)
from quire.core.cluster.node_compatibility import name_ranks, obstacle
from quire.core.cluster.peer_clock import PeerClock
from quire.core.cluster.probe import LIMIT_SECONDS, Probe
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.core.wire.channel import Channel, bind_router

logger = get_logger(__name__)

ANSWER_SECONDS, FAREWELL_SECONDS = 10.0, 3.0
_QUANTITIES: tuple[Quantity, ...] = ("latency", "bandwidth")


@dataclass
class Findings:
    """The results of a check. Pairs are (from, to)."""

    reports: dict[int, NodeReport] = field(default_factory=dict)  # by node
    seconds_apart: dict[int, float] = field(default_factory=dict)  # by how much a node's clock is ahead of node 0's
    links: dict[Quantity, dict[tuple[int, int], float]] = field(
        default_factory=lambda: {each: {} for each in _QUANTITIES}
    )
    problems: list[str] = field(default_factory=list)


class _Peer(NamedTuple):
    """The other end of a connection: the index of the address at which it came in, and its ZeroMQ identity."""

    channel: int
    identity: bytes


class _Node:
    """A node that is there, seen from node 0."""

    def __init__(self, peer: _Peer, hello: Hello, clock: PeerClock) -> None:
        self.peer = peer
        self.hello = hello
        self.clock = clock
        self.has_left = asyncio.Event()


class CheckCoordinator:
    """Node 0's end of a check. Use from one event loop.

    Args:
        misfits: finds out which nodes lack memory for the model, by all nodes' reports; takes seconds, in a thread.
            None: there is no model to compare with.

    Raises:
        ConfigError: an address cannot be listened on.
    """

    def __init__(
        self, start: CheckStart, misfits: Callable[[Mapping[int, NodeReport]], list[str]] | None = None
    ) -> None:
        self._start = start
        self._report = start.report
        self._nodes: dict[int, _Node] = {}  # by number
        self._clocks: defaultdict[_Peer, PeerClock] = defaultdict(PeerClock)
        self._refused: dict[_Peer, str] = {}  # sentences
        self._misfits = misfits
        self._num_strangers = 0
        self._measurements: dict[tuple[_Peer, int], asyncio.Future[float | None]] = {}  # by the node and number
        self._numbers = count()
        self._changed = asyncio.Event()
        self._decoder: msgspec.msgpack.Decoder[FromChecked] = msgspec.msgpack.Decoder(FromChecked)
        self._channels: list[Channel] = []
        for number, head in enumerate(start.heads):
            try:
                channel = bind_router(
                    f"tcp://{head}",
                    start.keys,
                    partial(self._on_frames, number),
                    self._on_stranger,
                    asks_for_senders=True,
                )
            except zmq.ZMQError as error:
                self._close_channels()
                raise ConfigError(
                    f"Nodes cannot join at {head}: {error}. --master-addr must be an address of this host, and "
                    "--master-port a free port, with one more for each further engine that has several hosts: end the "
                    "server that has it, or name another one on all nodes."
                ) from None
            self._channels.append(channel)
        self._probe = Probe(start.report.facts.address, start.keys)

    async def run(self, patience: float) -> Findings:
        """Waits up to `patience` seconds for the nodes, and measures the links between the nodes that joined."""
        await self._wait_for_nodes(patience)
        findings = Findings({0: self._report})
        own = self._report.facts
        for rank, node in sorted(self._nodes.items()):
            report = findings.reports[rank] = node.hello.report
            findings.seconds_apart[rank] = node.clock.seconds_apart
            if bool(report.facts.digest) != bool(own.digest):
                findings.problems.append(f"{_name(report)}: MODEL was named there or on node 0, but not on both.")
            elif (problem := obstacle(own, report.facts, node.clock.seconds_apart)) is not None:
                findings.problems.append(f"{_name(report)}: {problem}")
        findings.problems += self._say_who_is_missing(patience)
        for quantity in _QUANTITIES:
            await self._measure_all(quantity, findings)
        if self._misfits is not None and not self._missing():
            findings.problems += await asyncio.to_thread(self._misfits, findings.reports)
        await self._send_verdict(findings.problems)
        return findings

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self._probe.close()
        self._close_channels()

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close(linger_ms=500)

    async def _wait_for_nodes(self, patience: float) -> None:
        for head, ranks in self._missing_by_head():
            logger.info("waiting at %s for %s, %.0f s at most", head, self._nodes_of(ranks), patience)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self._missing():
                    self._changed.clear()
                    await self._changed.wait()

    async def _send_verdict(self, problems: list[str]) -> None:
        for node in self._nodes.values():
            self._send(node.peer, Verdict(problems))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                for node in self._nodes.values():
                    await node.has_left.wait()

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self._report.facts.num_ranks)) - set(self._nodes))

    def _missing_by_head(self) -> list[tuple[str, list[int]]]:
        """The missing nodes, by the address at which they join."""
        return [(head, list(ranks)) for head, ranks in groupby(self._missing(), self._start.head_of)]

    def _nodes_of(self, ranks: list[int]) -> str:
        return f"node {name_ranks(ranks)} of {self._report.facts.num_ranks}"

    def _say_who_is_missing(self, patience: float) -> list[str]:
        if not self._missing():
            return []
        sentences = [
            f"Within {patience:g} s, {self._nodes_of(ranks)} did not come to {head}: run `quire check-cluster` there "
            "with its --node-rank, and see whether it reaches this address and port (firewall)."
            for head, ranks in self._missing_by_head()
        ]
        if self._num_strangers:
            sentences.append(
                "Somebody without the join token was turned away; set the same QUIRE_JOIN_TOKEN on all nodes."
            )
        return sentences + list(self._refused.values())

    # ----------------------------------------------------------------------------------------------------- measuring

    async def _measure_all(self, quantity: Quantity, findings: Findings) -> None:
        """Measures every ordered pair. In each round every node sends to one other node, so there is one round fewer
        than there are nodes."""
        ranks = sorted(findings.reports)
        for distance in range(1, len(ranks)):
            pairs = list(zip(ranks, ranks[distance:] + ranks[:distance], strict=True))
            if quantity == "bandwidth":  # not where no node answers
                pairs = [pair for pair in pairs if pair in findings.links["latency"]]
            values = await asyncio.gather(*(self._measure(quantity, *pair) for pair in pairs))
            for (source, target), value in zip(pairs, values, strict=True):
                if value is not None:
                    findings.links[quantity][source, target] = value
                else:
                    address = findings.reports[target].facts.address
                    findings.problems.append(
                        f"Node {source} gets no answer from node {target} at {address}; open all TCP ports between the "
                        "nodes, and let QUIRE_HOST_IP name each host's address in the network that they share."
                    )

    async def _measure(self, quantity: Quantity, source: int, target: int) -> float | None:
        endpoint = self._probe.endpoint if target == 0 else self._nodes[target].hello.endpoint
        if source == 0:
            return await self._probe.measure(quantity, endpoint)
        peer, number = self._nodes[source].peer, next(self._numbers)
        self._measurements[peer, number] = measured = asyncio.get_running_loop().create_future()
        self._send(peer, Measure(number, quantity, endpoint))
        try:
            async with asyncio.timeout(LIMIT_SECONDS + ANSWER_SECONDS):
                return await measured
        except TimeoutError:
            return None
        finally:
            del self._measurements[peer, number]  # a late answer is to nothing

    # ----------------------------------------------------------------------------------------------------- messages

    def _on_frames(self, channel: int, frames: list[bytes]) -> None:
        identity, *said = frames
        peer = _Peer(channel, identity)
        try:
            kind, payload = said
            message = self._decoder.decode(payload) if kind == CHECK else None
        except (ValueError, msgspec.DecodeError) as error:
            where = self._channels[channel].sender or "an unknown address"
            self._refuse(
                peer, f"A node at {where} says what node 0 cannot read ({error}); install one version of Quire on all."
            )
            return
        match message:
            case None:  # a headless node of a server waits
                pass
            case Hello() as hello:
                self._on_hello(peer, hello)
            case Measured(number, value):
                measured = self._measurements.get((peer, number))
                if measured is not None and not measured.done():
                    measured.set_result(value)
            case Farewell():
                if (node := self._node_of(peer)) is not None:
                    node.has_left.set()

    def _on_hello(self, peer: _Peer, hello: Hello) -> None:
        own, facts = self._report.facts, hello.report.facts
        rank = facts.ranks[0] if len(facts.ranks) == 1 else -1
        clock = self._clocks[peer]
        clock.hear(hello.clock)
        before = self._nodes.get(rank)
        if facts.num_ranks != own.num_ranks or not 0 < rank < own.num_ranks:
            problem = obstacle(own, facts, clock.seconds_apart)
        elif before is not None and before.peer != peer and before.hello.report.facts.address != facts.address:
            problem = f"There is already {before.hello.report.facts}; give each node a number of its own."
        else:
            problem = None
        if problem is not None:
            self._refuse(peer, f"{_name(hello.report)}: {problem}")
            return
        if clock.may_have_waited:
            return
        if before is None or before.peer != peer:
            logger.info("%s is there", facts)
            self._nodes[rank] = _Node(peer, hello, clock)
            self._changed.set()
        self._send(peer, Welcome())

    def _refuse(self, peer: _Peer, sentence: str) -> None:
        if self._refused.get(peer) != sentence:
            self._refused[peer] = sentence
            logger.error("%s", sentence)
        self._send(peer, Verdict([sentence]))

    def _node_of(self, peer: _Peer) -> _Node | None:
        return next((node for node in self._nodes.values() if node.peer == peer), None)

    def _on_stranger(self) -> None:
        self._num_strangers += 1

    def _send(self, peer: _Peer, message: ToChecked) -> None:
        self._channels[peer.channel].send([peer.identity, *checking(message)])


def _name(report: NodeReport) -> str:
    name = str(report.facts)
    return name[0].upper() + name[1:]

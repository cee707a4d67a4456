"""Messages of `quire check-cluster` between nodes, as Structs in MessagePack. Their frames have a kind that no server
reads."""

from typing import Literal

import msgspec
from msgspec import Struct

from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.wire.channel import CurveKeys

CHECK = b"k"

Quantity = Literal["latency", "bandwidth"]


class GPUMemory(Struct, array_like=True, frozen=True):
    """Bytes of one GPU."""

    total_bytes: int
    free_bytes: int


class NodeReport(Struct, array_like=True, frozen=True):
    """One node's report on itself."""

    facts: NodeFacts  # the digest is empty where no checkpoint was named
    devices: str  # for people
    ram_bytes: int  # that are free
    gpus: list[GPUMemory]


class CheckStart(Struct, frozen=True):
    """A node's start message: the addresses of node 0, the keys, and the node's own report."""

    heads: list[str]  # node 0's address:port, or one for the hosts of each engine
    keys: CurveKeys
    report: NodeReport

    @property
    def head(self) -> str:
        """The address at which this node joins node 0."""
        [rank] = self.report.facts.ranks
        return self.head_of(rank)

    def head_of(self, rank: int) -> str:
        """The address at which a node joins node 0. All engines have the same number of hosts."""
        return self.heads[rank * len(self.heads) // self.report.facts.num_ranks]


class Hello(Struct, array_like=True, tag="hello", frozen=True):
    """A node announces itself, once a second."""

    report: NodeReport
    endpoint: str  # of its probe
    clock: float  # seconds since the epoch, as the message was sent


class Welcome(Struct, array_like=True, tag="welcome", frozen=True):
    """Node 0's answer to each `Hello`."""


class Measure(Struct, array_like=True, tag="measure", frozen=True):
    """Asks the node to measure its link to another node. The node answers with `Measured`."""

    number: int  # of the measurement
    quantity: Quantity
    endpoint: str


class Measured(Struct, array_like=True, tag="measured", frozen=True):
    """A latency in seconds or a bandwidth in bytes a second; None if the other node did not answer."""

    number: int  # of the measurement, which may have been given up meanwhile
    value: float | None


class Verdict(Struct, array_like=True, tag="verdict", frozen=True):
    """The check is over. No problems: the nodes can serve together."""

    problems: list[str]


class Farewell(Struct, array_like=True, tag="farewell", frozen=True):
    """Confirms that the node has the verdict, so that node 0 may end."""


FromChecked = Hello | Measured | Farewell
ToChecked = Welcome | Measure | Verdict


def checking(message: FromChecked | ToChecked) -> list[bytes]:
    """The frames that carry a message."""
    return [CHECK, msgspec.msgpack.encode(message)]

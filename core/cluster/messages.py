"""Messages between node 0 and the other nodes, as Structs in MessagePack.

A message is two frames: its kind and its payload. `WORKER` frames carry bytes for workers or of workers, as the rings
on each host carry them. `CONTROL` frames carry the Structs below.
"""

import msgspec
from msgspec import Struct

from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.config.resolved import EngineConfig
from quire.core.logging import LoggingConfig
from quire.core.wire.channel import CurveKeys
from quire.core.wire.protocol import FailureCause
from quire.core.wire.rank import Rank

CONTROL, WORKER = b"c", b"w"


class Beat(Struct, array_like=True, tag="beat", frozen=True):
    """A heartbeat, which both sides send every half second."""


class Join(Struct, array_like=True, tag="join", frozen=True):
    """A request to join. Repeated until node 0 answers."""

    facts: NodeFacts
    clock: float  # seconds since the epoch, as the message was sent


class NodeLost(Struct, array_like=True, tag="lost", frozen=True):
    """Reports that a node's workers have ended, or that the node was stopped."""

    reason: str
    cause: FailureCause = "other"  # "host": the node itself goes; "peer": its workers miss those of another node


class Joined(Struct, array_like=True, tag="joined", frozen=True):
    """Node 0 has admitted the node."""


class JoinRefused(Struct, array_like=True, tag="refused", frozen=True):
    """Node 0 refuses the node as it was started. Its form must never change, because nodes of other versions receive
    it, too."""

    reason: str


class StartWorkers(Struct, array_like=True, tag="start", frozen=True):
    """Orders the node to start these workers."""

    config: EngineConfig  # with node 0's folder of the checkpoint, for which the node puts its own
    ranks: list[Rank]
    factory: str
    init_method: str


class OpenRendezvous(Struct, array_like=True, tag="open_rendezvous", frozen=True):
    """Orders the node, which has an engine's first workers, to open the rendezvous port. `RendezvousOpened` answers."""


class RendezvousOpened(Struct, array_like=True, tag="rendezvous_opened", frozen=True):
    """The node listens at this address for the workers that it will start."""

    init_method: str  # see `RankGroups.join`


class StartEngine(Struct, array_like=True, tag="start_engine", frozen=True):
    """Orders the node to start the engine of `config.place.data`. `EngineStarted` answers."""

    config: EngineConfig  # as for `StartWorkers`; the node also says which of its engines this is
    init_method: str | None = None  # where its ranks meet those of other engines
    opens_rendezvous: bool = False  # the node chooses that place, and the engine listens there


class EndEngine(Struct, array_like=True, tag="end_engine", frozen=True):
    """Orders the node to end an engine at once, if it still runs."""

    data: int


class EngineStarted(Struct, array_like=True, tag="engine_started", frozen=True):
    """An engine was started; it may still load."""

    data: int
    address: str  # of its socket, for frontends with the keys of the join token
    rendezvous: str | None = None  # where the ranks of other engines meet its own, if it was to open that place


class EngineWanted(Struct, array_like=True, tag="engine_wanted", frozen=True):
    """A server is about to start an engine that shares experts with other servers' engines.

    Node 0 answers with `RendezvousReady` or `RendezvousFailed`.
    """

    data: int


class RendezvousReady(Struct, array_like=True, tag="rendezvous_ready", frozen=True):
    """All servers have joined: the server may start the engine, whose workers meet the others' at this address."""

    data: int
    init_method: str  # see `RankGroups.join`


class RendezvousFailed(Struct, array_like=True, tag="rendezvous_failed", frozen=True):
    """The server must not start the engine, because there is no rendezvous with the others. It may ask again."""

    data: int
    reason: str


class EpochEnded(Struct, array_like=True, tag="epoch_ended", frozen=True):
    """An engine with which this one shares experts is gone. The server ends this one, if it still runs."""

    data: int
    reason: str


class WaitsFor(Struct, array_like=True, tag="waits", frozen=True):
    """The hosts that engines with shared experts still wait for, as far as node 0 knows; None: all are there."""

    what: str | None


class EngineEnded(Struct, array_like=True, tag="engine_ended", frozen=True):
    """An engine has ended, or could not be started."""

    data: int
    code: int  # the exit code; negative is the signal that ended it
    reason: str | None = None  # why it could not be started
    was_killed: bool = False  # by the node, as `EndEngine` says


class ShareFile(Struct, array_like=True, tag="share", frozen=True):
    """A file of node 0's host, which workers will open under `path`."""

    path: str
    data: bytes


class Ended(Struct, array_like=True, tag="ended", frozen=True):
    """The engine has ended, or does not know the node. The node ends its workers, and joins again."""

    reason: str


EngineNews = EngineStarted | EngineEnded | EngineWanted
Order = (
    OpenRendezvous
    | StartWorkers
    | ShareFile
    | StartEngine
    | EndEngine
    | RendezvousReady
    | RendezvousFailed
    | EpochEnded
    | WaitsFor
)
FromNode = Join | Beat | NodeLost | RendezvousOpened | EngineNews
ToNode = Joined | JoinRefused | Beat | Order | Ended


class CoordinatorStart(Struct, array_like=True, frozen=True):
    """The start message of an engine on node 0, about its cluster."""

    address: str  # where nodes join, as address:port
    keys: CurveKeys
    facts: NodeFacts
    elsewhere: list[int] = []  # numbers of nodes that join at other engines


class NodeStart(Struct, array_like=True, frozen=True):
    """The start message of a headless node's process."""

    head: str  # node 0's name or address, and port; see `Participant`
    keys: CurveKeys
    facts: NodeFacts
    folder: str  # of the checkpoint on this host
    logging: LoggingConfig


def control(message: FromNode | ToNode) -> list[bytes]:
    """The frames that carry a message."""
    return [CONTROL, msgspec.msgpack.encode(message)]

"""Where the ranks of one engine, or of engines that share experts, find each other."""

from msgspec import Struct


class Meeting(Struct, array_like=True, frozen=True):
    """What the workers of one host are told of the place.

    Attributes:
        init_method: see `RankGroups.join`.
        fds: descriptors that the place needs, for the workers to inherit.
        address: of this host, at whose interface its ranks talk to those of other hosts; None: all are on this host.
    """

    init_method: str
    fds: list[int] = []
    address: str | None = None

"""Where the ranks of one engine, or of engines that share experts, find each other."""

import socket

from msgspec import Struct


class Rendezvous(Struct, array_like=True, frozen=True):
    """What the workers of one host are told of the place.

    Attributes:
        init_method: see `RankGroups.join`.
        fds: descriptors that the place needs, for the workers to inherit.
        address: of this host, at whose interface its ranks talk to those of other hosts; None: all are on this host.
    """

    init_method: str
    fds: list[int] = []
    address: str | None = None


def endpoint_of(listener: socket.socket) -> str:
    """The URL of the address and port at which a socket listens: for ZeroMQ, and for `RankGroups.join`."""
    address, port = listener.getsockname()
    return f"tcp://{address}:{port}"


def listening_rendezvous(listener: socket.socket, address: str) -> Rendezvous:
    """What the engine is told whose first worker listens there, on the host with that address."""
    fd = listener.fileno()
    return Rendezvous(f"{endpoint_of(listener)}?listen_fd={fd}", [fd], address)

"""The rendezvous of the ranks of one engine, or of all engines that share experts."""

import socket

from msgspec import Struct


class Rendezvous(Struct, array_like=True, frozen=True):
    """The rendezvous, as the workers of one host need it.

    Attributes:
        init_method: see `RankGroups.join`.
        fds: descriptors that the rendezvous needs, for the workers to inherit.
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
    """The rendezvous for the engine whose first worker listens on `listener`, on the host with `address`."""
    fd = listener.fileno()
    return Rendezvous(f"{endpoint_of(listener)}?listen_fd={fd}", [fd], address)

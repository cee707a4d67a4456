"""Messages between the frontend and its helpers: MessagePack over a socket, each with its length before it."""

import socket
import struct
from typing import Any

import msgspec
from msgspec import Struct

LENGTH = struct.Struct("<I")


def framed(message: Struct) -> bytes:
    """An encoded message with its length before it."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, kind: Any) -> Any:
    """The next message of a blocking socket, of type `kind`.

    Raises:
        EOFError: the other side closed the socket.
    """
    [length] = LENGTH.unpack(_receive_bytes(connection, LENGTH.size))
    return msgspec.msgpack.decode(_receive_bytes(connection, length), type=kind)


def _receive_bytes(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError
        filled += count
    return data

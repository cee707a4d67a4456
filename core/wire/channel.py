"""One ZeroMQ socket on an asyncio loop: whole inboxes drained per wake-up, sends that never wait.

An engine binds a ROUTER (`bind_router`), a frontend connects a DEALER (`connect_dealer`). Both hand every message to a
callback as a list of frames. On TCP, the launcher's CURVE keys encrypt messages and admit peers (CurveZMQ, RFC 26).
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

MESSAGES_PER_TURN, SECONDS_PER_TURN = 64, 0.005
"""The most messages, and the most time, before the event loop's other work has its turn. Otherwise a peer that sends
faster than we read would stop it."""


class CurveKeys(msgspec.Struct, array_like=True, frozen=True):
    """The engine's and its frontends' Z85 key pairs; only processes that were handed them can talk."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def generate(cls) -> "CurveKeys":
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())


class Channel:
    """A socket whose messages go to `on_message(frames)` on the running loop."""

    def __init__(self, socket: zmq.Socket, on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.FD
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    @property
    def address(self) -> str:
        """The endpoint, with the port that a wildcard bind was given."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, frames: Sequence[bytes]) -> None:
        """Queues one message. It is lost if the peer is gone; the request's owner notices that by other means."""
        self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        # ZeroMQ's descriptor is edge-triggered and a send may swallow the edge, so look again.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def close(self, linger_ms: int = 0) -> None:
        """Stops listening. Unsent messages get `linger_ms` to leave."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _drain(self) -> None:
        until = time.monotonic() + SECONDS_PER_TURN
        for _ in range(MESSAGES_PER_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:
                self._loop.call_soon(self._drain)  # later messages are not lost with this one
                raise
            if time.monotonic() >= until:
                break
        self._loop.call_soon(self._drain)


def bind_router(address: str, keys: CurveKeys | None, on_message: Callable[[list[bytes]], None]) -> Channel:
    """The engine's end; frames are [frontend identity, message]."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    _unbounded(socket)
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
    socket.bind(address)
    return Channel(socket, on_message)


def connect_dealer(address: str, keys: CurveKeys | None, on_message: Callable[[list[bytes]], None]) -> Channel:
    """A frontend's end; frames are [message]. The engine may not have bound yet: ZeroMQ keeps trying."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    _unbounded(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.connect(address)
    return Channel(socket, on_message)


def _unbounded(socket: zmq.Socket) -> None:
    # The scheduler bounds the messages in flight (running and queued requests); a second limit could only block.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)

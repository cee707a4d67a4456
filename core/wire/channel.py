"""One ZeroMQ socket on an asyncio loop: drains whole inboxes per wake-up, and never waits to send.

An engine binds a ROUTER (`bind_router`), a frontend connects a DEALER (`connect_dealer`). Both hand every message to a
callback as a list of frames. On TCP, CURVE keys encrypt messages and admit peers (CurveZMQ, RFC 26; ZAP, RFC 27).
"""

import asyncio
import functools
import hashlib
import operator
import sys
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils import z85

MESSAGES_PER_TURN, SECONDS_PER_TURN = 64, 0.005
"""The most messages, and the most time, before the event loop's other tasks run. Otherwise a peer that sends faster
than we read would starve them."""

CONNECT_SECONDS = 3.0
"""Limit of an unanswered connection attempt. The system's own limit is two minutes."""

UNBIND_MS = 1000
"""Limit of the wait for a listening socket to close, which takes a few switches between two threads."""

_REBUFFS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Events of a connection whose handshake fails, whichever side refuses."""

OnMessage = Callable[[list[bytes]], None]


class CurveKeys(msgspec.Struct, array_like=True, frozen=True):
    """The engine's and its frontends' Z85 key pairs. Only processes that have them can talk."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def generate(cls) -> "CurveKeys":
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def derive(cls, secret: bytes) -> "CurveKeys":
        """Derives the key pairs from a secret, by BLAKE2b with a different person string for each secret key
        (X25519)."""
        server, client = (
            z85.encode(hashlib.blake2b(secret, digest_size=32, person=person).digest())
            for person in (b"quire-server", b"quire-client")
        )
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)


class Channel:
    """A socket whose messages go to `on_message(frames)` on the running loop.

    Args:
        attendants: channels that end with this one.
        before_close: called before the socket is closed.

    Attributes:
        sender: the IP address that the message came from which is being handled; None where ZeroMQ does not know, or
            the channel does not ask.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        on_message: OnMessage,
        attendants: Sequence["Channel"] = (),
        before_close: Callable[[], None] = lambda: None,
        *,
        asks_for_senders: bool = False,
    ) -> None:
        self.sender: str | None = None
        self._asks_for_senders = asks_for_senders
        self._socket = socket
        self._on_message = on_message
        self._attendants = attendants
        self._before_close = before_close
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.FD
        self._connected_to: str | None = None
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    @property
    def address(self) -> str:
        """The endpoint, with the port that a wildcard bind was given."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Connects a dealer to `address`, and disconnects it from its former address.

        Args:
            address: with numbers. ZeroMQ would look a name up in the thread that moves the messages of all sockets.
        """
        if self._connected_to is not None:
            self._socket.disconnect(self._connected_to)
        self._connected_to = None
        self._socket.connect(address)
        self._connected_to = address

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queues one message. It is lost if the peer goes before the message arrives.

        Returns:
            False if a router has no such peer any more. A dealer does not know.

        Raises:
            zmq.Again: the channel keeps no messages for a peer to come, and none is there.
        """
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        # ZeroMQ's descriptor is edge-triggered and a send may swallow the edge, so look again.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stops listening, and frees the port at once. Unsent messages get `linger_ms` to leave."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.linger = linger_ms
            self._before_close()
            self._socket.disable_monitor()  # else ZeroMQ's thread waits for ever to deliver events
            self._socket.close()
            for attendant in self._attendants:
                attendant.close()

    def _drain(self) -> None:
        until = time.monotonic() + SECONDS_PER_TURN
        for _ in range(MESSAGES_PER_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._receive()
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

    def _receive(self) -> list[bytes]:
        if not self._asks_for_senders:
            return self._socket.recv_multipart(flags=zmq.NOBLOCK)
        frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        try:
            self.sender = str(frames[-1].get("Peer-Address"))
        except zmq.ZMQError:
            self.sender = None
        return [frame.bytes for frame in frames]


def bind_router(
    address: str,
    keys: CurveKeys | None,
    on_message: OnMessage,
    on_stranger: Callable[[], None] = lambda: None,
    *,
    listen_fd: int | None = None,
    asks_for_senders: bool = False,
) -> Channel:
    """The end that others connect to; frames are [identity of the peer, message].

    Args:
        on_stranger: called when somebody without the keys, or who speaks no ZeroMQ, is turned away.
        listen_fd: descriptor of a socket that listens at `address` already, for the channel to have. It needs keys.
        asks_for_senders: see `Channel.sender`.
    """
    if keys is None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        _unbounded(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(address)
        return Channel(socket, on_message, asks_for_senders=asks_for_senders)
    context = zmq.Context()  # of its own, because a context has one door
    door = context.socket(zmq.ROUTER)
    door.bind("inproc://zeromq.zap.01")
    socket = context.socket(zmq.ROUTER)
    _unbounded(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # reports peers that are gone: see `Channel.send`
    socket.zap_domain = b"quire"
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
    if listen_fd is not None:
        socket.setsockopt(zmq.USE_FD, listen_fd)
    events = _watch(socket, {_REBUFFS: on_stranger}, zmq.EVENT_CLOSED)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.disable_monitor()
        events.close()
        context.destroy(linger=0)
        raise
    attendants = [events, _keep_door(door, keys.client_public)]
    stop_listening = functools.partial(_stop_listening, socket, events._socket)
    channel = Channel(socket, on_message, attendants, stop_listening, asks_for_senders=asks_for_senders)
    # For a channel that is never closed: a context that is collected with its sockets would wait for them for ever.
    weakref.finalize(channel, _destroy, context, socket, door, events._socket).atexit = False
    return channel


def connect_dealer(
    address: str | None,
    keys: CurveKeys | None,
    on_message: OnMessage,
    *,
    on_rebuff: Callable[[], None] | None = None,
    on_disconnected: Callable[[], None] | None = None,
) -> Channel:
    """The end that connects; frames are [message]. The other may not have bound yet: ZeroMQ keeps trying.

    Args:
        address: see `Channel.connect`; None: it is not known yet.
        on_rebuff: called when the other end does not know our keys. With it, the channel keeps no messages for a peer
            to come: see `Channel.send`.
        on_disconnected: called when a connection ends. ZeroMQ makes another one, but messages may be lost.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    _unbounded(socket)
    calls: dict[int, Callable[[], None]] = {}
    if on_disconnected is not None:
        calls[zmq.EVENT_DISCONNECTED] = on_disconnected
    if on_rebuff is None:
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
    else:
        socket.setsockopt(zmq.RECONNECT_IVL, 200)  # perhaps for hours
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * CONNECT_SECONDS))
        calls[_REBUFFS] = on_rebuff
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    channel = Channel(socket, on_message, [_watch(socket, calls)] if calls else [])
    try:
        if address is not None:
            channel.connect(address)
    except zmq.ZMQError:
        channel.close()
        raise
    return channel


def _keep_door(door: zmq.Socket[bytes], client_public: bytes) -> Channel:
    """Answers ZAP requests: admits peers with the client's key. Knowing the server's key alone is not enough."""
    admitted = z85.decode(client_public)

    def on_request(frames: list[bytes]) -> None:
        start = frames.index(b"") + 1
        version, request_id, _domain, _address, _identity, mechanism, *credentials = frames[start:]
        is_known = mechanism == b"CURVE" and credentials == [admitted]
        status = [b"200", b"OK"] if is_known else [b"400", b"unknown key"]
        channel.send([*frames[:start], version, request_id, *status, b"", b""])

    channel = Channel(door, on_request)
    return channel


def _watch(socket: zmq.Socket[bytes], calls: dict[int, Callable[[], None]], others: int = 0) -> Channel:
    """Calls the function of each event of `socket` that happens.

    Args:
        others: events that somebody else awaits.
    """

    def on_event(frames: list[bytes]) -> None:
        for events, call in calls.items():
            if events & _event_of(frames):
                call()

    return Channel(socket.get_monitor_socket(functools.reduce(operator.or_, calls, others)), on_event)


def _stop_listening(socket: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
    """Waits until ZeroMQ's thread has closed the listening socket, so that another process can bind its port."""
    socket.unbind(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    while events.poll(UNBIND_MS):
        if _event_of(events.recv_multipart()) == zmq.EVENT_CLOSED:
            break


def _event_of(frames: list[bytes]) -> int:
    """The number of an event: see zmq_socket_monitor(3)."""
    return int.from_bytes(frames[0][:2], sys.byteorder)


def _destroy(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], *others: zmq.Socket[bytes]) -> None:
    """Ends a context with its sockets; `socket`, the first, has a monitor. Holds references to all until then."""
    if not socket.closed:
        socket.disable_monitor()
    context.destroy(linger=0)


def _unbounded(socket: zmq.Socket) -> None:
    # The scheduler bounds the messages in flight (running and queued requests); a second limit could only block.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)

"""uvicorn's HTTP/1.1 connections, with limits on half-sent requests, and with bodies after an `Upgrade` header."""

import asyncio
import functools
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.frontend.http.errors import Problem
from quire.frontend.http.tally import Tally

_HOP_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})
_UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})

MAX_DROPPED_BYTES = 64 * 1024**2
"""Bytes of a request that are read after its answer, for clients that send all of it before they read."""


class _RefusedRequest(Exception):
    """Raised in a callback of httptools to end its parsing; the client gets the message with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Http10Cycle(RequestResponseCycle):
    """An answer to a client of HTTP/1.0, which knows no chunks: the connection's end ends a body of unknown length."""

    is_unframed = False

    async def send(self, message: Any) -> None:
        """Sends a message. Each piece of a body of unknown length passes uvicorn's check of the length."""
        if message["type"] == "http.response.start":
            self.is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
            if self.is_unframed:
                self.chunked_encoding = False
        elif self.is_unframed:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _ClosesAfterTheRequest:
    """The transport of a connection's last answer: closes the connection when the whole request has been read.

    A connection that is closed earlier is reset, and a client that still sends sees a broken pipe instead of the
    answer. urllib always sends its whole request before it reads.

    The reference to the `HttpConnection` is weak. That object holds the answer, and a cycle would keep the request in
    memory after the connection is lost.
    """

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = weakref.ref(connection)
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """Ends the connection now, or with the request's last byte, or at the request's deadline."""
        if (connection := self._connection()) is not None:
            connection.close_after_request()


class HttpConnection(HttpToolsProtocol):
    """One connection. It is closed when a request's head is too long, or a request is not complete in time.

    This class times heads, and bodies that no handler reads. `RequestObserver` times the bodies that a handler waits
    for, because its error has the shape of the client's API.

    An `Upgrade` to another protocol is ignored, as RFC 9110 (7.8) allows. httptools takes the bytes after such a head
    for the other protocol's, so the body would be lost: the request is parsed again without the header. Only a
    websocket goes on as one, at the server's paths for these.

    Args:
        request_timeout: seconds from the connection's beginning, or a request's first byte, to the request's last byte.
        max_head_bytes: limit for a request's line and headers together.
        max_headers: limit for the number of headers.
        max_connections: limit for the number of connections of all servers; one more is told 503, and closed.
        max_own_connections: the same limit for those of this process.
        connections_of_all: counts those of all servers.
        websocket: makes the protocol of a connection that becomes a websocket; None: there are none.
        websocket_paths: where there are websockets.
    """

    def __init__(
        self,
        *args: Any,
        request_timeout: float,
        max_head_bytes: int,
        max_headers: int,
        max_connections: int | None,
        max_own_connections: int,
        connections_of_all: Tally,
        websocket: Callable[..., asyncio.Protocol] | None = None,
        websocket_paths: frozenset[bytes] = frozenset(),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._request_timeout = request_timeout
        self._max_head_bytes = max_head_bytes
        self._max_headers = max_headers
        self._max_connections = max_connections
        self._max_own_connections = max_own_connections
        self._connections_of_all = connections_of_all
        self._websocket = websocket
        self._websocket_paths = websocket_paths
        self._num_dropped_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = True
        self._is_complete = False
        self._closes_after_request = False
        self._num_messages = 0
        self._num_head_bytes = 0
        self._open_cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()
        self._connections_of_all.add(1)
        if self._max_connections is not None and self._connections_of_all.total > self._max_connections:
            self._refuse_connection(self._max_connections)
        elif len(self.connections) > self._max_own_connections:
            self._refuse_connection(self._max_own_connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._connections_of_all.add(-1)
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client has closed its half, after which the transport closes the other."""
        self._disconnect()

    def _disconnect(self) -> None:
        """Tells all answers that are not complete that nobody gets them. uvicorn tells the last of several alone, and
        only once the connection is lost: what is written before raises an error."""
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open_cycles = []

    def close_after_request(self) -> None:
        """Closes the connection once the request that is being read is complete or late; what comes is dropped."""
        self._closes_after_request = True
        if self._is_complete:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        num_messages = self._num_messages
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _RefusedRequest):
                self._refuse(error.__context__.status, str(error.__context__))
                return
            self.logger.warning("Invalid HTTP request received.")
            self._refuse(400, "This is not a valid HTTP/1.1 request.")
            return
        if self._in_head and num_messages == self._num_messages:  # bytes that came with a head's beginning do not count
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._max_head_bytes:  # before its end: an endless head is not kept
                self._refuse(431, self._too_many_bytes)

    def _feed(self, data: bytes) -> None:
        """Parses `data`. Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT is for proxies") from None
                [offset] = upgrade.args
                if self._websocket is not None and self._opens_websocket():
                    self._become(self._websocket, data[offset:])
                    return
                data = self._head_without_upgrade() + data[offset:]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _opens_websocket(self) -> bool:
        """True if the request asks for a websocket where there is one, and no earlier request waits for its answer."""
        protocols = [value.strip().lower() for name, value in self.headers if name == b"upgrade"]
        path = self.url.partition(b"?")[0]
        return protocols == [b"websocket"] and path in self._websocket_paths and self._may_write()

    def _become(self, websocket: Callable[..., asyncio.Protocol], data: bytes) -> None:
        """Hands the connection to a websocket's protocol, with the request's head and the bytes after it."""
        self._stop_deadline()
        self._in_head = False
        self.connections.discard(self)
        protocol = websocket(
            config=self.config,
            server_state=self.server_state,
            app_state=self.app_state,
            on_lost=functools.partial(self._connections_of_all.add, -1),
        )
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        lines = [b"GET %b HTTP/1.1" % self.url, *(b"%b: %b" % header for header in self.headers)]
        protocol.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + data)

    def _head_without_upgrade(self) -> bytes:
        tokens = [token.strip() for name, value in self.headers if name == b"connection" for token in value.split(b",")]
        tokens = [token for token in tokens if token.lower() not in _UPGRADE_TOKENS]
        headers = [(name, value) for name, value in self.headers if name not in _HOP_HEADERS]
        if tokens:
            headers.append((b"connection", b", ".join(tokens)))
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in headers]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head, self._is_complete = True, False
        self._num_messages += 1
        self._num_head_bytes = self._num_dropped_bytes = 0
        self._start_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # fields after a chunked body are trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._max_head_bytes:
            raise _RefusedRequest(431, self._too_many_bytes)
        if len(self.headers) > self._max_headers:
            raise _RefusedRequest(431, f"The request has more than {self._max_headers} headers; send fewer.")
        version = self.parser.get_http_version()
        if version == "1.1" and sum(name == b"host" for name, _ in self.headers) != 1:  # RFC 9112, 3.2
            raise _RefusedRequest(400, "A request of HTTP/1.1 has exactly one Host header; add it.")
        if self.parser.should_upgrade():
            return  # parsed again, or handed on: see _feed
        self._in_head = False
        super().on_headers_complete()
        self._open_cycles = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        self._open_cycles.append(self.cycle)
        if version == "1.0":
            self.cycle.__class__ = _Http10Cycle  # uvicorn makes cycles itself, and this one has not begun
        if not self.cycle.keep_alive:
            self.cycle.transport = cast(asyncio.Transport, _ClosesAfterTheRequest(self))

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body. What comes after the answer is dropped, up to `MAX_DROPPED_BYTES`: then the
        connection is closed, so that nobody keeps this server reading a body that it has refused."""
        if self.cycle.response_complete:
            self._num_dropped_bytes += len(body)
            if self._num_dropped_bytes > MAX_DROPPED_BYTES:
                self._stop_deadline()
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_deadline()
        self._is_complete = True
        if self._closes_after_request:
            self.transport.close()
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection. One whose request was answered early is not idle: the rest is read and dropped."""
        if self._is_complete:
            super().timeout_keep_alive_handler()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # Half-sent requests.

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self._request_timeout, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self._in_head and not self.flow.read_paused:
            self._refuse(408, f"The request's headers did not arrive within {self._request_timeout:g} seconds.")
        elif self.cycle is not None and self.cycle.response_complete:
            self.transport.close()
        else:  # a handler waits for the body, or reading is paused while an earlier request is answered
            self._start_deadline()

    @property
    def _too_many_bytes(self) -> str:
        return f"The request's headers exceed {self._max_head_bytes} bytes; send shorter ones."

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection; if no answer is under way, first sends this one, past the application."""
        self._stop_deadline()
        if self.transport.is_closing():
            return
        if self._may_write():
            body = Problem(status, message).body()
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            if status == 503:
                headers.append((b"retry-after", b"1"))
            lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
            self.transport.write(b"\r\n".join([*lines, *(b"%b: %b" % header for header in headers), b"", body]))
        self._disconnect()
        self.transport.close()

    def _refuse_connection(self, most: int) -> None:
        self._refuse(503, f"This server has {most} connections, and takes no more. Try again.")

    def _may_write(self) -> bool:
        """True if the next bytes on the connection would be the answer to the request that is being read."""
        if self.pipeline:
            return False
        if self.cycle is None or self.cycle.response_complete:
            return True
        return not self._in_head and not self.cycle.response_started

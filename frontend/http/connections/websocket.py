"""Connections that became websockets (RFC 6455), spoken by the package websockets."""

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_CLOSE_SECONDS = 10.0
"""How long a client may take to read the last bytes."""


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn's websocket, whose application ends it when the server stops.

    Args:
        on_lost: is called when the connection is gone.
    """

    def __init__(self, *args: Any, on_lost: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:  # answers would pile up for a client that reads nothing
            self.conn.data_to_send()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._abort_soon()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.close":
            self._abort_soon()

    def _abort_soon(self) -> None:
        """Ends a connection that was closed, even if its client does not read what is left."""
        self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def shutdown(self) -> None:
        """Is called when the server begins to stop. An open websocket stays, until its application is done with it."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

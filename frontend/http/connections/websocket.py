"""Connections that became websockets (RFC 6455), spoken by the package websockets."""

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


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

    def shutdown(self) -> None:
        """Is called when the server begins to stop. An open websocket stays, until its application is done with it."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

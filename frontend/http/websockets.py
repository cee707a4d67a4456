"""The routes that are websockets, and what they share: who may connect, and how a connection is refused."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from litestar.connection import WebSocket
from litestar.types import Guard

from quire.frontend.http.errors import ErrorReporter, ForbiddenError

REALTIME = "/v1/realtime"
WEBSOCKET_PATHS = (REALTIME,)


class WebsocketDoor:
    """Lets connections in that the other routes would let in, and refuses others with an HTTP answer.

    Args:
        guards: those of the other routes.
        origins: pages of these origins may connect, beside those of this server; `*` is all. A browser sends the
            origin of the page, and asks no leave as it does for other requests.
    """

    def __init__(self, guards: Sequence[Guard], origins: Sequence[str], errors: ErrorReporter) -> None:
        self._guards = guards
        self._origins = origins
        self._errors = errors

    async def check(self, socket: WebSocket[Any, Any, Any]) -> None:
        """Raises RequestError for who may not connect."""
        origin = socket.headers.get("origin")
        own = socket.headers.get("host")
        if origin and not {"*", origin} & set(self._origins) and urlsplit(origin).netloc != own:
            raise ForbiddenError(f"Pages of {origin[:200]} may not connect; the server's --allowed-origins names more.")
        for guard in self._guards:
            await guard(socket, socket.route_handler)  # type: ignore[misc]  # all of ours are coroutines

    async def refuse(self, socket: WebSocket[Any, Any, Any], error: Exception) -> None:
        """Answers instead of opening the websocket."""
        answer = self._errors.report(error, f"websocket {socket.scope['path']}").response()
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        body = answer.content
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await socket.send(
            {"type": "websocket.http.response.start", "status": answer.status_code or 500, "headers": headers}
        )
        await socket.send({"type": "websocket.http.response.body", "body": body, "more_body": False})

"""The route of realtime transcriptions, a websocket."""

import functools
import importlib.util
from typing import Any

from litestar import Request, get, websocket
from litestar.connection import WebSocket
from litestar.exceptions import WebSocketDisconnect
from litestar.handlers import BaseRouteHandler

from quire.frontend.audio.realtime_events import ServerEvent, write_event
from quire.frontend.audio.realtime_session import RealtimeSession
from quire.frontend.audio.service import SpeechToText
from quire.frontend.http.body_budget import charge_of
from quire.frontend.http.errors import ErrorReporter, UpgradeRequiredError
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.websockets import REALTIME, WebsocketDoor


def realtime_routes(
    service: SpeechToText, state: ServerState, door: WebsocketDoor, errors: ErrorReporter
) -> list[BaseRouteHandler]:
    """Handlers for /v1/realtime. The door has the guards, so that who may not come in gets an HTTP answer."""

    @websocket(REALTIME)
    async def realtime(socket: WebSocket[Any, Any, Any]) -> None:
        """Transcribes sounds while they come."""
        try:
            await door.check(socket)
            state.check_ready()
            service.clip_seconds()
        except Exception as error:
            await door.refuse(socket, error)
            return
        await socket.accept()
        check = functools.partial(door.check, socket)
        session = RealtimeSession(service, state, errors, _sender(socket), check, charge_of(socket.scope))
        code = await session.run(socket.iter_data("text"))
        if code is not None:
            await socket.close(code)

    @get(REALTIME, include_in_schema=False)
    async def describe_realtime(request: Request[Any, Any, Any]) -> None:
        """Tells a client that asks for no websocket."""
        if importlib.util.find_spec("websockets") is None:
            raise UpgradeRequiredError(
                f"{REALTIME} is a websocket, for which this server lacks a package: pip install 'quire[media]'."
            )
        raise UpgradeRequiredError(f"{REALTIME} is a websocket; connect with ws://.")

    return [realtime, describe_realtime]


def _sender(socket: WebSocket[Any, Any, Any]) -> Any:
    async def send(event: ServerEvent) -> None:
        try:
            await socket.send_text(write_event(event))
        except WebSocketDisconnect:
            raise ConnectionResetError("the client is gone") from None

    return send

"""A user's middleware."""

from typing import Any


class Tagging:
    """Adds a header to each answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def tagged(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-tag", b"yes")]}
            await send(message)

        await self._app(scope, receive, tagged)

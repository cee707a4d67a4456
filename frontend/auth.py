"""API keys: who may call the routes under /v1."""

import hmac
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from quire.frontend.errors import AuthenticationError


class ApiKeyGuard:
    """Lets a request pass whose `Authorization: Bearer` header carries one of `keys`; no keys let everyone pass.

    Each comparison takes the same time wherever the strings differ, and all keys are always compared. It is a coroutine
    because Litestar runs guards that are not in a thread, which takes longer than all of this.
    """

    def __init__(self, keys: list[str]) -> None:
        self._keys = [key.encode() for key in keys]

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if not self._keys:
            return
        header = connection.headers.get("authorization", "")
        scheme, *rest = header.split(maxsplit=1) or [""]
        presented = "".join(rest).strip().encode("latin-1")  # the bytes as they came, whatever the client meant
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise AuthenticationError(
                "This server asks for an API key: send it as `Authorization: Bearer KEY`."
                if not header
                else "The API key is wrong."
            )

"""API keys for the routes that make the model work."""

import hmac
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from quire.frontend.http.errors import AuthenticationError


class ApiKeyGuard:
    """Lets a request pass that carries one of `keys` in `Authorization: Bearer`, or in `x-api-key` as Anthropic's
    clients do. A server without keys has no guard, because Litestar copies the handler of a guarded route each time.

    Each comparison takes the same time wherever the strings differ, and all keys are always compared. The guard is a
    coroutine because Litestar runs a plain function in a thread, which takes longer than the comparisons.
    """

    def __init__(self, keys: list[str]) -> None:
        self._keys = [key.encode() for key in keys]

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        header = connection.headers.get("authorization", "")
        own_header = connection.headers.get("x-api-key", "")
        scheme, *rest = header.split(maxsplit=1) or [""]
        bearer = "".join(rest) if scheme.lower() == "bearer" else ""
        presented = [text.strip().encode("latin-1") for text in (bearer, own_header)]  # the bytes as they came
        matches = [hmac.compare_digest(one, key) for one in presented for key in self._keys]
        if not any(matches):
            raise AuthenticationError(
                "This server asks for an API key: send it as `Authorization: Bearer KEY`."
                if not header and not own_header
                else "The API key is wrong."
            )

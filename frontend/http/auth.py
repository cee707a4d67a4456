"""API keys for the routes that make the model work, and for those that change how the server runs."""

import hmac
from typing import Any, Self

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from quire.frontend.http.errors import AuthenticationError, ForbiddenError
from quire.frontend.keys.caller import set_caller
from quire.frontend.keys.key_file import digest_of
from quire.frontend.keys.key_ring import KeyRing


class _Guard:
    """A guard that stays one object: Litestar makes deep copies of the guards of a route, and of all they refer to."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class ApiKeyGuard(_Guard):
    """Lets a request pass that carries a key in `Authorization: Bearer`, or in `x-api-key` as Anthropic's clients do,
    within the key's requests a minute. The request belongs to the key's holder from then on. A server without keys has
    no guard, because Litestar copies the handler of a guarded route each time.

    The guard is a coroutine because Litestar runs a plain function in a thread, which takes longer than comparing keys.
    """

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        presented = _presented(connection)
        is_found, caller = self._keys.find(presented)
        if not is_found:
            raise AuthenticationError(
                "The API key is wrong."
                if presented
                else "This server asks for an API key: send it as `Authorization: Bearer KEY`."
            )
        if caller is not None:
            await caller.admit_request()
            set_caller(caller)


class AdminKeyGuard(_Guard):
    """Lets a request pass that carries one of the administrator's keys, as `ApiKeyGuard` finds keys.

    Args:
        keys: those of `--admin-api-key`; without any, nobody passes.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [digest_of(key.encode()) for key in keys]

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        presented = _presented(connection)
        if not presented:
            raise AuthenticationError(
                "This route asks for an administrator's key: send it as `Authorization: Bearer KEY`."
            )
        digests = [digest_of(each) for each in presented]
        matches = [hmac.compare_digest(one, other) for one in digests for other in self._digests]  # always all of them
        if not any(matches):
            raise ForbiddenError(
                "This route is for administrators: it takes a key of the server's --admin-api-key alone."
            )


class AdminPortGuard(_Guard):
    """Lets a request pass that came to the administrators' `port`."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        server = connection.scope.get("server")
        if server is None or server[1] != self._port:
            raise ForbiddenError("This route is for administrators: this server's --admin-port alone answers it.")


def _presented(connection: ASGIConnection[Any, Any, Any, Any]) -> list[bytes]:
    """The keys of a request, as the bytes that came."""
    header = connection.headers.get("authorization", "")
    own_header = connection.headers.get("x-api-key", "")
    scheme, *rest = header.split(maxsplit=1) or [""]
    bearer = "".join(rest) if scheme.lower() == "bearer" else ""
    if not header and not own_header:
        return []
    return [text.strip().encode("latin-1") for text in (bearer, own_header)]

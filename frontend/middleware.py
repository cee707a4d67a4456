"""What happens around every HTTP request, whatever its route: counting, request ids, access log."""

import asyncio
import logging
import time
import uuid
from typing import cast

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from quire.core.logging import get_logger
from quire.frontend.errors import RequestTimeoutError

logger = get_logger(__name__)

_FINE_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5),
    *(10, 30, 60),
)
_COARSE_SECONDS = (0.1, 0.5, 1)
_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
"""Routes that monitors poll: counting them would drown the others."""


class HttpMetrics:
    """Counters of HTTP requests, under the names that FastAPI's instrumentator gives them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "Requests by method, status and route.", ["method", "status", "handler"], registry=registry
        )
        self._request_bytes = Summary(
            "http_request_size_bytes", "Bytes of request bodies.", ["handler"], registry=registry
        )
        self._response_bytes = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", ["handler"], registry=registry
        )
        self._fine = Histogram(
            "http_request_duration_highr_seconds",
            "Seconds per request, in many buckets.",
            buckets=_FINE_SECONDS,
            registry=registry,
        )
        self._coarse = Histogram(
            "http_request_duration_seconds",
            "Seconds per request, by route.",
            ["handler", "method"],
            buckets=_COARSE_SECONDS,
            registry=registry,
        )

    def count(
        self, method: str, status: int, handler: str, request_bytes: int, response_bytes: int, seconds: float
    ) -> None:
        """One request has been answered; `handler` is its route's template."""
        if handler in _UNCOUNTED:
            return
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._request_bytes.labels(handler).observe(request_bytes)
        self._response_bytes.labels(handler).observe(response_bytes)
        self._fine.observe(seconds)
        self._coarse.labels(handler, method).observe(seconds)


class RequestObserver:
    """ASGI application around another: watches what goes through.

    Args:
        request_id_headers: answer with X-Request-Id, the client's own or a fresh one.
        access_log: log a line for each request.
        unlogged_paths: paths that the access log leaves out.
        request_timeout: seconds that a request's body may take to arrive; no limit when None.
        root_path: prefix that a proxy may leave on paths, or may have taken away; routes are found either way.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        *,
        request_id_headers: bool,
        access_log: bool,
        unlogged_paths: frozenset[str],
        request_timeout: float | None = None,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._request_id_headers = request_id_headers
        self._access_log = access_log
        self._unlogged_paths = unlogged_paths
        self._request_timeout = request_timeout
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._observe(cast(HTTPScope, scope), receive, send)
        else:
            await self._app(scope, receive, send)

    async def _observe(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        started_at = time.monotonic()
        if self._root_path and scope["path"].startswith(self._root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)
        path, status, request_bytes, response_bytes = scope["path"], 500, 0, 0
        receive_body = self._limited(receive)
        request_id = _ensure_request_id(scope) if self._request_id_headers else None

        async def receive_counted() -> Message:
            nonlocal request_bytes
            message = await receive_body()
            if message["type"] == "http.request":
                request_bytes += len(message["body"])
            return message  # type: ignore[return-value]

        async def send_counted(message: Message) -> None:
            nonlocal status, response_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                if request_id is not None:
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            elif message["type"] == "http.response.body":
                response_bytes += len(message["body"])
            await send(message)

        try:
            await self._app(scope, receive_counted, send_counted)  # type: ignore[arg-type]
        finally:
            seconds = time.monotonic() - started_at
            handler = str(scope.get("path_template") or "none")
            self._metrics.count(scope["method"], status, handler, request_bytes, response_bytes, seconds)
            if self._access_log and path not in self._unlogged_paths:
                logger.log(logging.INFO, "%s %s %d %.3f s", scope["method"], path, status, seconds)

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, with a deadline for the body. What comes after it, the client's leaving, may take any time."""
        seconds = self._request_timeout
        if seconds is None:
            return receive
        deadline = asyncio.get_running_loop().time() + seconds
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()  # type: ignore[return-value]
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeoutError(f"The request's body did not arrive within {seconds:g} seconds.") from None
            is_whole = message["type"] != "http.request" or not message["more_body"]
            return message  # type: ignore[return-value]

        return receive_in_time  # type: ignore[return-value]


def _ensure_request_id(scope: HTTPScope) -> bytes:
    """The client's X-Request-Id; a fresh one is put among its headers when there is none."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and value:
            return value
    request_id = uuid.uuid4().hex.encode()
    scope["headers"] = [*scope["headers"], (b"x-request-id", request_id)]
    return request_id

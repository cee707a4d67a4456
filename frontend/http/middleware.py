"""Counts every HTTP request, gives it an id and limits its body's time, on all routes. Answers HEAD as GET.

Its answers list the ignored fields of the body in a header.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable
from typing import Any, cast

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send, WebSocketScope
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from quire.core.logging import REQUEST_ID
from quire.frontend.chat.client_headers import FRESH_ID_HEADER
from quire.frontend.http.audit_log import AuditLog
from quire.frontend.http.body_budget import BodyBudget, BodyCharge
from quire.frontend.http.errors import RequestTimeoutError
from quire.frontend.http.json_request import IGNORED
from quire.frontend.http.unknown_fields import HEADER
from quire.frontend.requests.ids import MAX_ID_CHARACTERS
from quire.frontend.requests.usage import CALL_USAGE, CallUsage

_FINE_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5),
    *(10, 30, 60),
)
_COARSE_SECONDS = (0.1, 0.5, 1)
_UNCOUNTED = frozenset({"/metrics", "/health", "/live", "/livez", "/load", "/ping", "/ready", "/readyz", "/version"})
"""Routes that monitors poll: their counts would drown those of the other routes."""


class HttpMetrics:
    """Counters of HTTP requests, under the names that FastAPI's instrumentator gives them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests_total",
            "Requests by method, status and route.",
            ["method", "status", "handler"],
            registry=registry,
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
        # Counters by route, method and kind of status: finding one by its labels costs more than counting.
        self._routes: dict[tuple[str, int, str], tuple[Counter, Summary, Summary, Histogram]] = {}

    def count(
        self, method: str, status: int, handler: str, request_bytes: int, response_bytes: int, seconds: float
    ) -> None:
        """One request has been answered; `handler` is its route's template."""
        if handler in _UNCOUNTED:
            return
        key = (method, status // 100, handler)
        route = self._routes.get(key) or self._routes.setdefault(key, self._labelled(*key))
        requests, sizes, response_sizes, durations = route
        requests.inc()
        sizes.observe(request_bytes)
        response_sizes.observe(response_bytes)
        self._fine.observe(seconds)
        durations.observe(seconds)

    def _labelled(self, method: str, kind: int, handler: str) -> tuple[Counter, Summary, Summary, Histogram]:
        return (
            self._requests.labels(method, f"{kind}xx", handler),
            self._request_bytes.labels(handler),
            self._response_bytes.labels(handler),
            self._coarse.labels(handler, method),
        )


class RequestObserver:
    """Wraps an ASGI application: watches its requests and answers.

    Args:
        request_id_headers: answer with X-Request-Id, the client's own or a fresh one.
        request_timeout: seconds that a request's body may take to arrive; no limit when None.
        root_path: prefix of paths that a proxy may keep or strip; routes are found either way.
        has_cors: answers may differ by the request's origin, which `Vary` states for caches.
        names_requests: log lines about a request have its id.
        audit: gets a line for each request; None writes none.
        bodies: what the bodies of all requests may take; no limit when None.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        *,
        request_id_headers: bool,
        request_timeout: float | None = None,
        root_path: str = "",
        has_cors: bool = False,
        names_requests: bool = False,
        audit: AuditLog | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._request_id_headers = request_id_headers
        self._request_timeout = request_timeout
        self._root_path = root_path
        self._added = [(b"vary", b"Origin")] if has_cors else []
        self._names_requests = names_requests or request_id_headers or audit is not None
        self._audit = audit
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._observe(cast(HTTPScope, scope), receive, send)
        elif scope["type"] == "websocket":
            await self._pass(cast(WebSocketScope, scope), receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pass(self, scope: WebSocketScope, receive: Receive, send: Send) -> None:
        """Passes a websocket on. What it keeps of messages counts as a body does; the audit has a line of it."""
        started_at, usage = time.monotonic(), CallUsage()
        self._strip_root_path(scope)
        messages = _Messages(receive, send)
        if self._audit is not None:
            CALL_USAGE.set(usage)
        charge = None if self._bodies is None else self._bodies.charge()
        if charge is not None:
            charge.attach(cast("dict[str, Any]", scope))
        try:
            await self._app(scope, messages.receive, messages.send)
        finally:
            if charge is not None:
                charge.release()
            if self._audit is not None:
                self._audit.add(
                    scope,
                    request_id=_ensure_request_id(scope).decode("latin-1")[:MAX_ID_CHARACTERS],
                    method="GET",
                    status=messages.status,
                    is_whole=True,
                    seconds=time.monotonic() - started_at,
                    request_bytes=messages.num_received,
                    response_bytes=messages.num_sent,
                    usage=usage,
                )

    def _strip_root_path(self, scope: Scope) -> None:
        if self._root_path and scope["path"].startswith(self._root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)

    async def _observe(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        started_at = time.monotonic()
        method = scope["method"]
        if method == "HEAD":  # as GET; the server, whose scope stays as it is, leaves the body out
            scope = cast(HTTPScope, {**scope, "method": "GET"})
        self._strip_root_path(scope)
        added, request_id, usage = self._added, "", CallUsage()
        if self._names_requests:
            header = _ensure_request_id(scope)
            request_id = header.decode("latin-1")[:MAX_ID_CHARACTERS]
            REQUEST_ID.set(request_id)
            if self._request_id_headers:
                added = [*added, (b"x-request-id", header)]
        if self._audit is not None:
            CALL_USAGE.set(usage)
        charge = None if self._bodies is None else self._bodies.charge()
        exchange = _Exchange(scope, receive, send, added, self._request_timeout, charge)
        try:
            await self._app(scope, exchange.receive, exchange.send)  # type: ignore[arg-type]
        finally:
            exchange.release()
            seconds = time.monotonic() - started_at
            handler = str(scope.get("path_template") or "none")
            self._metrics.count(
                method, exchange.status, handler, exchange.request_bytes, exchange.response_bytes, seconds
            )
            if self._audit is not None:
                self._audit.add(
                    scope,
                    request_id=request_id,
                    method=method,
                    status=exchange.status,
                    is_whole=exchange.is_answered,
                    seconds=seconds,
                    request_bytes=exchange.request_bytes,
                    response_bytes=exchange.response_bytes,
                    usage=usage,
                )


class _Messages:
    """The messages of one websocket: counts their bytes, and notes how the handshake was answered."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.status = 500
        self.num_received = self.num_sent = 0
        self._receive = receive
        self._send = send

    async def receive(self) -> Any:
        message: Any = await self._receive()
        self.num_received += len(message.get("text") or message.get("bytes") or "")
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.accept":
            self.status = 101
        elif message["type"] == "websocket.http.response.start":
            self.status = message["status"]
        self.num_sent += len(message.get("text") or message.get("bytes") or message.get("body") or "")
        await self._send(message)


class _Exchange:
    """One request and its answer: counts their bytes, and holds the deadline of the request's body.

    Args:
        added: headers of the answer in addition to the application's.
        body_seconds: limit for the body to arrive. The wait for the client's disconnect afterwards has no limit.
        charge: what the body takes of the bytes for all bodies; None: there is no limit.
    """

    __slots__ = (
        *("status", "request_bytes", "response_bytes", "is_answered"),
        *("_scope", "_receive", "_send", "_added", "_body_seconds", "_deadline", "_is_whole", "_charge"),
    )

    def __init__(
        self,
        scope: HTTPScope,
        receive: Receive,
        send: Send,
        added: list[tuple[bytes, bytes]],
        body_seconds: float | None,
        charge: BodyCharge | None,
    ) -> None:
        self.status = 500
        self.request_bytes = 0
        self.response_bytes = 0
        self.is_answered = False
        self._scope = cast("dict[str, Any]", scope)
        self._receive = receive
        self._send = send
        self._added = added
        self._body_seconds = body_seconds
        self._deadline = None if body_seconds is None else asyncio.get_running_loop().time() + body_seconds
        self._is_whole = False
        self._charge = charge
        if charge is not None:
            charge.attach(self._scope)

    async def receive(self) -> Message:
        """The request's next message. Raises RequestTimeoutError, and OverloadedError if there are too many bodies."""
        if self._is_whole:
            return await self._receive()  # type: ignore[return-value]
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"The request's body did not arrive within {self._body_seconds:g} seconds."
            ) from None
        self._is_whole = message["type"] != "http.request" or not message["more_body"]
        if message["type"] == "http.request":
            self.request_bytes += len(message["body"])
            if self._charge is not None:
                self._charge.add(len(message["body"]))
        return message  # type: ignore[return-value]

    def release(self) -> None:
        """Gives back what the body has taken."""
        if self._charge is not None:
            self._charge.release()

    def send(self, message: Message) -> Awaitable[None]:
        """Passes `message` on. This is no coroutine, because a coroutine would cost time for each token."""
        if message["type"] == "http.response.body":
            self.response_bytes += len(message["body"])
            self.is_answered = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            added = self._added
            if IGNORED in self._scope:
                added = [*added, (HEADER, self._scope[IGNORED].header())]
            if added:
                kept = [header for header in message["headers"] if header not in added]
                message = {**message, "headers": [*kept, *added]}
        return self._send(message)


_FRESH_ID = FRESH_ID_HEADER.lower().encode()


def _ensure_request_id(scope: HTTPScope | WebSocketScope) -> bytes:
    """The client's X-Request-Id, or a fresh id, which also becomes the answer's if its body names none."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and value:
            return value
    request_id = uuid.uuid4().hex.encode()
    headers = [header for header in scope["headers"] if header[0] != _FRESH_ID]
    scope["headers"] = [*headers, (_FRESH_ID, request_id)]
    return request_id

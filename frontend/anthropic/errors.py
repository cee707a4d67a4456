"""Errors in Anthropic's shape."""

from typing import Any

import msgspec
from litestar import Request, Response

from quire.core.errors import ParameterError
from quire.frontend.anthropic.answers import ErrorAnswer, ErrorCause, ThreadDetails
from quire.frontend.http.errors import ErrorReporter, Problem
from quire.frontend.http.event_stream import event_frame

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_encode = msgspec.json.Encoder().encode


class UnsupportedThreadError(ParameterError):
    """The request belongs to a conversation that the server would keep."""


def error_body(problem: Problem, details: ThreadDetails | None = None) -> bytes:
    """The JSON body."""
    kind = _TYPES.get(problem.status) or ("api_error" if problem.status >= 500 else "invalid_request_error")
    return _encode(ErrorAnswer(error=ErrorCause(kind, problem.message, details)))


def error_frame(problem: Problem) -> bytes:
    """The last event of a stream that fails."""
    return event_frame(error_body(problem), "error")


PING = event_frame(b'{"type":"ping"}', "ping")
"""The event without content, which keeps a connection open."""


class AnthropicErrors:
    """Litestar's exception handler for the routes of the Messages API."""

    def __init__(self, errors: ErrorReporter) -> None:
        self._errors = errors

    def handle(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """The answer to any exception."""
        problem = self._errors.report(error, f"{request.method} {request.url.path}")
        details = ThreadDetails() if isinstance(error, UnsupportedThreadError) else None
        return Response(
            error_body(problem, details),
            status_code=problem.status,
            media_type="application/json",
            headers=problem.headers,
        )

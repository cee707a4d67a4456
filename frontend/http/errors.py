"""The one place where exceptions become HTTP answers in OpenAI's error shape.

QuireError's tree knows nothing of HTTP; errors that only a server can meet are added to the tree here.
"""

import math
import re
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException, ValidationException
from msgspec import Struct

from quire.core.errors import (
    BodyTooLargeError,
    DeadlineError,
    EngineDeadError,
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestError,
    UnavailableError,
)
from quire.core.logging import get_logger
from quire.frontend.http.missing_routes import describe_missing

logger = get_logger(__name__)


class AuthenticationError(RequestError):
    """No key, or a wrong one (401)."""


class ForbiddenError(RequestError):
    """The key is valid, but not for this route (403)."""


class RequestTimeoutError(QuireError):
    """The client did not send its whole request in time (408); the connection is closed."""


class ClientGoneError(QuireError):
    """The client closed its connection before it got the answer (499, as in nginx)."""


class MediaTypeError(RequestError):
    """The body is of a type or in a coding that the route does not read (415)."""


class UpgradeRequiredError(RequestError):
    """The route is a websocket, and the request asks for none (426)."""


class ErrorDetail(Struct):
    """An error in OpenAI's shape. `param` names the request's field, `code` repeats the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(Struct):
    """Body of every answer that is not a success."""

    error: ErrorDetail


CLIENT_GONE = 499
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    CLIENT_GONE: "ClientGoneError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_encode = msgspec.json.Encoder().encode

_FOLDERS = re.compile(r"""(?<![\w:/.])/(?:[^\s/'"]+/)+""")
"""Folders before the name of a file, in the text of an error."""

MAX_MESSAGE_CHARACTERS = 2000
"""Longest message, because it may quote megabytes that the client sent. A longer one loses its middle."""


class Problem(Struct):
    """An exception in the terms of HTTP."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        self.message = _shortened(self.message)
        self.param = self.param and _shortened(self.param)

    def detail(self) -> ErrorDetail:
        """The error as the client gets it."""
        kind = _TYPES.get(self.status) or (HTTPStatus(self.status).phrase.replace(" ", "") + "Error")
        return ErrorDetail(self.message, kind, self.param, self.status)

    def body(self) -> bytes:
        """The JSON body."""
        return _encode(ErrorBody(self.detail()))

    def response(self) -> Response[bytes]:
        """The whole answer."""
        return Response(self.body(), status_code=self.status, media_type="application/json", headers=self.headers)


def describe(error: Exception) -> Problem:
    """Status, message and headers for any exception; 500 without details for an unexpected one."""
    match error:
        case AuthenticationError():
            return Problem(401, str(error), headers={"WWW-Authenticate": "Bearer"})
        case ForbiddenError():
            return Problem(403, str(error))
        case UpgradeRequiredError():
            return Problem(426, str(error), headers={"Upgrade": "websocket"})
        case MediaTypeError():
            return Problem(415, str(error), headers={"Accept-Encoding": "identity"})
        case NotFoundError():
            return Problem(404, str(error), error.param)
        case OverloadedError():
            return Problem(429, str(error), error.param, _retry_after(error.retry_after_seconds))
        case BodyTooLargeError():
            return Problem(413, str(error), error.param)
        case RequestError():
            return Problem(400, str(error), error.param)
        case UnavailableError():
            return Problem(503, str(error), headers=_retry_after(error.retry_after_seconds))
        case EngineDeadError():
            return Problem(503, _without_folders(str(error)))
        case RequestTimeoutError():
            return Problem(408, str(error), headers={"Connection": "close"})
        case DeadlineError():
            return Problem(504, str(error))
        case ClientGoneError():
            return Problem(CLIENT_GONE, str(error))
        case QuireError():
            return Problem(500, _without_folders(str(error)))
        case HTTPException():
            return _describe_http(error)
        case RecursionError():
            return Problem(400, "The request is nested too deeply.")
        case _:
            return Problem(500, "Internal error; the server's log tells more.")


def _describe_http(error: HTTPException) -> Problem:
    """Errors of Litestar itself: routes, methods, body size."""
    headers = dict(error.headers or {})
    if isinstance(error, MethodNotAllowedException):
        return Problem(405, "This route does not take that method; see the Allow header.", headers=headers)
    if isinstance(error, ValidationException):
        return _describe_invalid(error)
    status = error.status_code
    return Problem(status, error.detail or HTTPStatus(status).phrase, headers=headers)


def _describe_invalid(error: ValidationException) -> Problem:
    """Refusals by Litestar: a missing body, or wrong parameters of the query or the path. Quire decodes the bodies."""
    wrong = next((each for each in error.extra or () if isinstance(each, dict)), {})
    if wrong.get("source") not in ("query", "path"):
        return Problem(400, "The request body is empty; send a JSON object.")
    return Problem(400, f"{wrong['key']}: {wrong['message']}", wrong["key"])


def _shortened(text: str) -> str:
    half = MAX_MESSAGE_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def _without_folders(text: str) -> str:
    """`text` with files by their names alone: where they are is the operator's to know, from the log."""
    return _FOLDERS.sub("", text)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


class ErrorReporter:
    """Turns exceptions into answers, and logs the server's own faults.

    Args:
        log_stacks: log the stack of every error answer, the client's mistakes included.
        max_body_bytes: the limit that a 413 states.
    """

    def __init__(self, *, log_stacks: bool, max_body_bytes: int) -> None:
        self._log_stacks = log_stacks
        self._max_body_bytes = max_body_bytes

    def report(self, error: Exception, where: str) -> Problem:
        """Describes `error`, and logs it if the server is at fault or logs all stacks. `where` names the request."""
        problem = describe(error)
        if problem.status == 413 and not isinstance(error, QuireError):  # by Litestar, which names no limit
            problem.message = (
                f"The request body exceeds {self._max_body_bytes} bytes; "
                "the server's --max-request-body-bytes raises the limit."
            )
        if problem.status == 500 and not isinstance(error, QuireError):
            logger.error("%s failed", where, exc_info=error)
        elif self._log_stacks and problem.status != CLIENT_GONE:
            logger.warning("%s was answered %d: %s", where, problem.status, problem.message, exc_info=error)
        elif problem.status >= 500 and not isinstance(error, UnavailableError | DeadlineError):
            logger.error("%s failed: %s", where, _shortened(str(error)))
        return problem

    def handle(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Litestar's exception handler for everything."""
        if isinstance(error, NotFoundException):
            error = NotFoundError(describe_missing(request.scope["path"]))
        return self.report(error, f"{request.method} {request.scope['path']}").response()

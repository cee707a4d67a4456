"""Errors in the shape and with the statuses of Text Embeddings Inference."""

from typing import Any

import msgspec
from litestar import Request, Response

from quire.core.errors import ParameterError, TokenizerError
from quire.frontend.http.errors import ErrorReporter, Problem
from quire.frontend.pooling.tasks import WrongTaskError
from quire.frontend.tei.answers import ErrorType, TeiError

_encode = msgspec.json.Encoder().encode


class EmptyInputError(ParameterError):
    """The request has no input, or an empty one (400)."""


class TooMuchError(ParameterError):
    """An input is too long, or there are too many (413)."""


def described(error: Exception, problem: Problem) -> tuple[int, ErrorType]:
    """The status and the type of an error."""
    match error:
        case WrongTaskError():
            return 424, "Backend"
        case EmptyInputError():
            return 400, "Empty"
        case TooMuchError():
            return 413, "Validation"
        case TokenizerError():
            return 422, "Tokenizer"
    match problem.status:
        case 400:
            return 422, "Validation"
        case 429:
            return 429, "Overloaded"
        case 500:
            return 424, "Backend"
        case 503:
            return 503, "Unhealthy"
    return problem.status, "Validation"


class TeiErrors:
    """Litestar's exception handler for the routes of Text Embeddings Inference."""

    def __init__(self, errors: ErrorReporter) -> None:
        self._errors = errors

    def handle(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """The answer to any exception."""
        problem = self._errors.report(error, f"{request.method} {request.url.path}")
        status, kind = described(error, problem)
        return Response(
            _encode(TeiError(problem.message, kind)),
            status_code=status,
            media_type="application/json",
            headers=problem.headers,
        )

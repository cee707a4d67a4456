"""Makes errors of an engine's reasons why a request failed."""

from quire.core.errors import EngineError, OverloadedError, ParameterError, QuireError, UnavailableError
from quire.core.wire.row_outputs import RequestFailure
from quire.frontend.metrics.request_metrics import RequestMetrics


def error_of(failure: RequestFailure, metrics: RequestMetrics | None) -> QuireError:
    """The error for a failure; a request that was turned away is counted."""
    match failure.kind:
        case "invalid":
            return ParameterError(failure.message)
        case "overloaded":
            if metrics is not None:
                metrics.on_rejected(failure.limit)
            return OverloadedError(failure.message, retry_after_seconds=failure.retry_after_seconds)
        case "unavailable":
            return UnavailableError(failure.message, retry_after_seconds=failure.retry_after_seconds)
        case _:
            return EngineError(failure.message)

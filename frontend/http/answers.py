"""The answers of handlers: a Struct as JSON, or a stream of events. Both end when the client disconnects."""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.errors import ErrorBody, ErrorReporter, Problem
from quire.frontend.http.event_stream import KEEP_ALIVE, EventStream, error_frame
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.server_state import ServerState

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_ASKED_FORMAT = "endpoint-load-metrics-format"
_REPORT = "endpoint-load-metrics"


def json_answer(body: Any, *, status_code: int = 200, headers: dict[str, str] | None = None) -> ASGIResponse:
    """A Struct as JSON."""
    return ASGIResponse(body=_encode(body), media_type="application/json", status_code=status_code, headers=headers)


def documented(body: Any, error: Any = ErrorBody) -> dict[int, ResponseSpec]:
    """A route's answers, for the API's documentation."""
    return {
        200: ResponseSpec(body, description="Success", generate_examples=False),
        400: ResponseSpec(error, description="The request is wrong; `param` names the field.", generate_examples=False),
    }


def documented_empty() -> dict[int, ResponseSpec]:
    """As `documented`, for a route whose success has no body."""
    return {
        200: ResponseSpec(None, description="Success", generate_examples=False),
        503: ResponseSpec(ErrorBody, description="Not now.", generate_examples=False),
    }


class LoadReport:
    """Reports the load of all engines to clients that send the header `endpoint-load-metrics-format`.

    ORCA load reports, which load balancers read, as text or JSON:
    https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._metrics = engine.metrics

    def headers(self, request: JsonRequest) -> dict[str, str]:
        """The report in the format that `request` asks for; none for an unknown format, or with --disable-log-stats."""
        asked = request.headers.get(_ASKED_FORMAT, "").lower()
        if not asked or self._metrics is None:
            return {}
        waiting, usage = self._metrics.num_waiting, self._metrics.kv_cache_usage
        named = {"num_requests_waiting": float(waiting), "kv_cache_usage_perc": float(usage)}
        match asked:
            case "text":
                return {_REPORT: "TEXT " + ", ".join(f"named_metrics.{name}={each}" for name, each in named.items())}
            case "json":
                return {_REPORT: "JSON " + json.dumps({"named_metrics": named})}
        return {}


class HttpAnswers:
    """Answers of one server, once the model is ready.

    Args:
        keep_alive_seconds: silence after which a stream sends a comment line; 0 sends none.
    """

    def __init__(self, state: ServerState, errors: ErrorReporter, keep_alive_seconds: float) -> None:
        self._state = state
        self._errors = errors
        self._keep_alive_seconds = keep_alive_seconds

    def check_ready(self) -> None:
        """Raises UnavailableError while requests cannot be served."""
        self._state.check_ready()

    async def whole(
        self, work: Coroutine[Any, Any, Any], request: JsonRequest, load: LoadReport | None = None
    ) -> ASGIResponse:
        """The result of `work`, as JSON, with a report of the load if the request asks `load` for it."""
        body = await self.result(work, request)
        return json_answer(body, headers=load.headers(request) if load is not None else None)

    async def result(self, work: Coroutine[Any, Any, T], request: JsonRequest) -> T:
        """The result of `work`, which ends when the client disconnects."""
        return await self._state.run(work, request.receive)

    def stream(
        self,
        frames: AsyncGenerator[bytes, None],
        error_frame: Callable[[Problem], bytes] = error_frame,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> EventStream:
        """Frames as they come; `error_frame` makes the last one of a stream that fails, `keep_alive` ends a silence."""
        return EventStream(
            frames,
            self._state,
            self._errors,
            keep_alive_seconds=self._keep_alive_seconds,
            keep_alive=keep_alive,
            error_frame=error_frame,
        )

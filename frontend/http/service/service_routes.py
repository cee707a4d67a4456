"""Routes for the operator of a server: health and metrics for monitors, and control of the profiler."""

from typing import Any

import msgspec
from litestar import get, post, route
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from msgspec import Struct, field
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import quire
from quire.core.engine.fleet_status import EngineStatus
from quire.core.errors import EngineDeadError, ParameterError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.answers import documented, documented_empty, json_answer
from quire.frontend.http.errors import ErrorBody, UnavailableError, describe
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.pages.front_page import About, FrontPage
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service.metrics_page import MetricsPage


class Health(Struct, omit_defaults=True):
    """Answer of GET /health when requests can be served."""

    engine: EngineStatus  # of all engines as one
    engines: list[EngineStatus] = field(default_factory=list)  # of each, where there are several


class Unhealthy(ErrorBody):
    """Answer of GET /health when they cannot: why, and how the engine is."""

    engine: EngineStatus
    engines: list[EngineStatus] = field(default_factory=list)


class Version(Struct):
    """Answer of GET /version."""

    version: str


class Timeline(Struct):
    """Answer of POST /stop_profile: the file on the server's machine, the first worker's if each writes one."""

    path: str | None


class ProfileOptions(Struct):
    """Optional body of POST /start_profile."""

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


class Load(Struct):
    """Answer of GET /load: requests that the model or its tokenizer works on."""

    server_load: int


def front_page_route(page: FrontPage) -> Any:
    """The handler of /, which is open to all."""

    @get("/", responses=documented(About), summary="About")
    async def about(request: JsonRequest) -> ASGIApp:
        """A description of this server: a page for browsers, else JSON."""
        if "text/html" not in request.headers.get("accept", ""):
            return json_answer(page.about())
        host = request.headers.get("host", "localhost")  # as it came; `request.url` raises where it is malformed
        return ASGIResponse(body=page.html(f"{request.scope['scheme']}://{host}").encode(), media_type="text/html")

    return about


def monitoring_routes(engine: AsyncLLM, server: ServerConfig, state: ServerState, page: MetricsPage) -> list[Any]:
    """Handlers that probes, load balancers and Prometheus poll. They need no API key: they show no prompt or output."""

    def check() -> ASGIApp:
        status = engine.engine_status()
        try:
            state.check_ready()
            engine.client.check_health()
            if status.engine.state == "restarting":
                raise UnavailableError(
                    f"The engine is being restarted: {status.engine.reason} Requests wait, and are answered then.",
                    retry_after_seconds=1,
                )
        except (UnavailableError, EngineDeadError) as error:
            return unhealthy(error)
        return json_answer(Health(status.engine, status.engines))

    def unhealthy(error: UnavailableError | EngineDeadError) -> ASGIApp:
        problem, status = describe(error), engine.engine_status()
        body = Unhealthy(problem.detail(), status.engine, status.engines)
        return json_answer(body, status_code=problem.status, headers=problem.headers)

    answers = {200: ResponseSpec(Health, description="Requests are served.", generate_examples=False)}
    answers[503] = ResponseSpec(Unhealthy, description="Not now.", generate_examples=False)

    @get("/health", responses=answers, summary="Health")
    async def health() -> ASGIApp:
        """200 when requests are served; 503 while the model loads, while an engine that died is being restarted, while
        stopping, and when the engine is gone for good.

        The body says what is happening: the engine's state, the reason of a restart, and the seconds since its last
        message; a healthy one sends one every two seconds at least. During a restart, requests wait and are answered.
        With several engines, one that serves is enough, and `engines` has the state of each.
        """
        return check()

    @route("/ping", http_method=["GET", "POST"], status_code=200, responses=answers, summary="Ping")
    async def ping() -> ASGIApp:
        """As /health."""
        return check()

    @get(["/ready", "/readyz"], responses=answers, summary="Readiness")
    async def ready() -> ASGIApp:
        """As /health, for orchestrators: whether requests should be sent here now."""
        return check()

    @get(["/live", "/livez"], responses=answers, summary="Liveness")
    async def live() -> ASGIApp:
        """200 unless a new start of the server is the only remedy, because its engine is gone for good. So it is 200
        while the model loads, while an engine is being restarted, and while stopping."""
        try:
            engine.client.check_health()
        except EngineDeadError as error:
            return unhealthy(error)
        status = engine.engine_status()
        return json_answer(Health(status.engine, status.engines))

    @get("/version", responses=documented(Version), summary="Version")
    async def version() -> ASGIApp:
        """Version of Quire."""
        return json_answer(Version(quire.__version__))

    @get("/metrics", media_type="text/plain", summary="Metrics")
    async def metrics() -> ASGIApp:
        """Counters for Prometheus."""
        return ASGIResponse(body=await page.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @get("/load", responses=documented(Load), summary="Load")
    async def load() -> ASGIApp:
        """The number of requests in flight."""
        return json_answer(Load(state.num_in_flight))

    handlers: list[Any] = [health, ping, ready, live, version, metrics]
    if server.enable_server_load_tracking:
        handlers.append(load)
    return handlers


def _read_options(body: bytes) -> ProfileOptions:
    try:
        return msgspec.json.decode(body, type=ProfileOptions) if body else ProfileOptions()
    except msgspec.DecodeError as error:
        raise ParameterError(f"The body is no JSON object of a profile's options: {error}.") from None


def control_routes(engine: AsyncLLM, state: ServerState) -> list[Any]:
    """Handlers that change how the server runs; they need an API key."""

    @post("/start_profile", status_code=200, responses=documented_empty(), summary="Start a profile")
    async def start_profile(request: JsonRequest) -> ASGIApp:
        """Starts the profiler of --profiler-config. A JSON body may hold profile_prefix, delay_iterations and
        max_iterations for torch's profiler.
        """
        state.check_ready()
        await engine.start_profile(**msgspec.structs.asdict(_read_options(await request.take_body())))
        return ASGIResponse(body=b"")

    @post("/stop_profile", status_code=200, responses=documented(Timeline), summary="Stop the profile")
    async def stop_profile() -> ASGIApp:
        """Ends the recording and writes it into the folder of --profiler-config."""
        return json_answer(Timeline(await engine.stop_profile()))

    return [start_profile, stop_profile] if engine.profiles else []

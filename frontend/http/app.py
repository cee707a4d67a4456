"""Puts the HTTP application together: routes, API keys, errors, documentation."""

from typing import Any

from litestar import Litestar, Request, Response, Router
from litestar.config.cors import CORSConfig
from litestar.types import Guard
from prometheus_client import CollectorRegistry
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from quire.core import envs
from quire.core.logging import get_logger
from quire.frontend.anthropic.errors import AnthropicErrors
from quire.frontend.anthropic.models import ModelInfos
from quire.frontend.anthropic.routes import anthropic_routes
from quire.frontend.anthropic.service import Messages
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.audio.realtime_routes import realtime_routes
from quire.frontend.audio.routes import audio_routes
from quire.frontend.audio.service import SpeechToText
from quire.frontend.chat.conversation import Conversations
from quire.frontend.cohere.routes import cohere_route
from quire.frontend.cohere.service import CohereEmbeddings
from quire.frontend.entry_store.access import LocalEntries, StoredEntries
from quire.frontend.http.answers import HttpAnswers
from quire.frontend.http.auth import AdminKeyGuard, AdminPortGuard, ApiKeyGuard
from quire.frontend.http.errors import ErrorReporter
from quire.frontend.http.invocations import Invocations
from quire.frontend.http.json_request import BodyReader, requests_read_by
from quire.frontend.http.pages.documents import Documentation
from quire.frontend.http.pages.front_page import FrontPage
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service.adapter_routes import adapter_routes, updates_adapters
from quire.frontend.http.service.dev_routes import dev_routes
from quire.frontend.http.service.metrics_page import MetricsPage, OwnPage
from quire.frontend.http.service.service_routes import control_routes, front_page_route, monitoring_routes
from quire.frontend.http.websockets import WebsocketDoor
from quire.frontend.keys.key_ring import KeyRing
from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.openai.routes import openai_routes
from quire.frontend.openai.tokenize import Tokenization
from quire.frontend.pooling.routes import pooling_routes
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.tei.routes import tei_routes
from quire.frontend.tei.services import TeiServices
from quire.frontend.tei.shared_routes import shared_routes

logger = get_logger(__name__)


def create_app(
    engine: AsyncLLM,
    server: ServerConfig,
    *,
    state: ServerState | None = None,
    registry: CollectorRegistry | None = None,
    page: MetricsPage | None = None,
    entries: StoredEntries | None = None,
    keys: KeyRing | None = None,
    announces: bool = True,
) -> Litestar:
    """The application, ready for any ASGI server.

    Args:
        state: loading, serving or stopping, and the requests in flight; by default a fresh one with the model loaded.
        registry: the metrics of this process; by default a fresh one.
        page: the text of /metrics, if it holds more than this process's metrics.
        entries: responses and conversations that several servers of one command share.
        keys: those of `server`, if somebody watches their file or counts their use elsewhere.
        announces: log what is served; only one of several servers does.
    """
    state = state or ServerState()
    registry = registry if registry is not None else CollectorRegistry()
    register_collectors(registry, engine, of_process=page is None)
    page = page or OwnPage(registry)
    entries = entries or LocalEntries(server.entry_store())
    errors = ErrorReporter(log_stacks=server.log_error_stack, max_body_bytes=server.max_request_body_bytes)
    keys = keys or server.key_ring(RateLimits())
    guards, admin_guards = _guards(server, keys)
    if keys is not None:
        registry.register(keys.usage)
    answers = HttpAnswers(state, errors, server.sse_keep_alive_interval)
    documentation = None
    if not server.disable_fastapi_docs:
        documentation = Documentation(server.path_prefix, strict_fields=server.strict_fields)
    front_page = FrontPage(
        engine.model.names,
        needs_key=server.needs_key,
        has_documentation=documentation is not None,
        root_path=server.path_prefix,
    )
    conversations = Conversations(engine, server, announces=announces)
    pooling = PoolingServices(engine, server, conversations, announces=announces)
    tei, invocations = TeiServices(engine, pooling), Invocations()
    if conversations.searches is not None:
        registry.register(conversations.searches)
    speech = SpeechToText(engine, conversations)
    door = WebsocketDoor(guards, server.allowed_origins, errors)
    guarded = [
        *openai_routes(
            engine,
            server,
            state,
            answers,
            conversations,
            ModelInfos(engine),
            entries,
            invocations,
            num_owners=1 if keys is None else keys.num_keys,
        ),
        audio_routes(speech, answers),
        anthropic_routes(Messages(engine.model, conversations), answers, errors),
        *pooling_routes(pooling, answers, invocations),
        cohere_route(CohereEmbeddings(engine, pooling), answers),
        tei_routes(tei, answers, errors),
        *shared_routes(tei, Tokenization(engine, conversations), answers, errors, invocations),
        invocations.route(answers),
    ]
    admin = [
        *control_routes(engine, state),
        *(dev_routes(engine, server, state) if envs.read_flag("SERVER_DEV_MODE") else []),
        *(adapter_routes(engine, state) if updates_adapters(engine) else []),
    ]
    return Litestar(
        route_handlers=[
            Router("/", route_handlers=guarded, guards=guards),
            Router("/", route_handlers=admin, guards=admin_guards),
            *realtime_routes(speech, state, door, errors),
            front_page_route(front_page),
            *monitoring_routes(engine, server, state, page),
            *(documentation.routes() if documentation else []),
        ],
        exception_handlers={Exception: _ErrorsByClient(errors).handle},
        request_class=requests_read_by(BodyReader(strict=server.strict_fields)),
        request_max_body_size=server.max_request_body_bytes,
        cors_config=_cors(server),
        openapi_config=documentation.config() if documentation else None,
        logging_config=None,
    )


def register_collectors(registry: CollectorRegistry, engine: AsyncLLM, *, of_process: bool = True) -> None:
    """Registers metrics of the engine if it has any, and of this process: its memory, threads and Python."""
    if of_process:
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
    if engine.metrics is not None:
        registry.register(engine.metrics)


def _guards(server: ServerConfig, keys: KeyRing | None) -> tuple[list[Guard], list[Guard]]:
    """The guards of the routes for clients, and of those for administrators. A server that asks nobody for a key leaves
    both open, unless administrators have a port."""
    clients: list[Guard] = [] if keys is None else [ApiKeyGuard(keys)]
    admin: list[Guard] = [] if server.admin_port is None else [AdminPortGuard(server.admin_address[1])]
    if server.admin_api_key is not None or (keys is not None and not admin):
        admin.append(AdminKeyGuard(server.admin_api_key or []))
    return clients, admin


class _ErrorsByClient:
    """Answers exceptions on routes that clients of both APIs use. Anthropic's send `anthropic-version`."""

    def __init__(self, errors: ErrorReporter) -> None:
        self._openai = errors
        self._anthropic = AnthropicErrors(errors)

    def handle(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        """Litestar's exception handler."""
        errors = self._anthropic if "anthropic-version" in request.headers else self._openai
        return errors.handle(request, error)


def _cors(server: ServerConfig) -> CORSConfig | None:
    if not server.allowed_origins:
        if server.allow_credentials or [*server.allowed_methods, *server.allowed_headers] != ["*", "*"]:
            logger.warning(
                "CORS is off: --allow-credentials, --allowed-methods and --allowed-headers need --allowed-origins"
            )
        return None
    methods: list[Any] = server.allowed_methods
    # A browser that sends credentials rejects `*`, so the answer then names the request's origin.
    names_origins = server.allow_credentials and "*" in server.allowed_origins
    return CORSConfig(
        allow_origins=[] if names_origins else server.allowed_origins,
        allow_origin_regex=".*" if names_origins else None,
        allow_methods=methods,
        allow_headers=server.allowed_headers,
        allow_credentials=server.allow_credentials,
    )

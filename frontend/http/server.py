"""Runs the HTTP application: binds first, answers /health while the model loads, drains at the end.

This module owns sockets, signals and their order; `app.py` owns the answers.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Sequence

import uvicorn
from prometheus_client import CollectorRegistry, disable_created_metrics

from quire.core import envs
from quire.core.engine.gc_tuning import tune_garbage_collector
from quire.core.errors import EngineDeadError
from quire.core.logging import get_logger
from quire.core.process_start import STARTED_AT
from quire.core.wire.kv_groups import KVGroupSpec, keeps_nothing
from quire.core.wire.protocol import EngineReady
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.entry_store.access import StoredEntries
from quire.frontend.http.app import create_app
from quire.frontend.http.audit_log import AuditLog
from quire.frontend.http.body_budget import BodyBudget
from quire.frontend.http.connections.certificates import CertificateWatcher
from quire.frontend.http.connections.listener import bind, bind_admin, release, url_of
from quire.frontend.http.connections.signals import signal_handlers
from quire.frontend.http.connections.uvicorn_config import uvicorn_config
from quire.frontend.http.middleware import HttpMetrics, RequestObserver
from quire.frontend.http.pages.greeting import greeting
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service.metrics_page import MetricsPage, cache_facts, cache_room
from quire.frontend.http.tally import Holdings
from quire.frontend.http.user_middleware import wrapped
from quire.frontend.keys.caller import Limits
from quire.frontend.keys.key_ring import KeyRing
from quire.frontend.keys.rate_limits import RateLimits

logger = get_logger(__name__)

HEALTH_SECONDS = 1.0


async def serve(
    engine: AsyncLLM, server: ServerConfig, listener: socket.socket | None = None, *, greet: bool = False
) -> None:
    """Serves until SIGTERM or SIGINT, then drains, closes the engine and returns.

    Args:
        listener: from `bind`, bound before the engine was made; None binds here.
        greet: print how to talk to the server once it is ready.

    Raises:
        ConfigError: the address is taken, or the model cannot be loaded.
        EngineDeadError: the engine died and could not be restarted.
    """
    listener = listener or bind(server)
    try:
        await HttpServer(engine, server, listener, greet=greet, admin_listeners=bind_admin(server)).run()
    finally:
        await engine.aclose()
        release(listener, server)


class HttpServer:
    """One run of the server.

    Args:
        greet: print how to talk to the server once it is ready.
        announces: log what is served; only one of several servers does.
        registry: holds this process's metrics; a fresh one when None.
        page: the text of /metrics; that of `registry` when None.
        entries: responses and conversations that several servers of one command share.
        limits: counts what API keys use, where several servers share the count.
        holdings: connections and bytes of bodies, where several servers share the bounds of these.
        admin_listeners: further sockets; those of `--admin-port`.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        server: ServerConfig,
        listener: socket.socket,
        *,
        greet: bool,
        announces: bool = True,
        registry: CollectorRegistry | None = None,
        page: MetricsPage | None = None,
        entries: StoredEntries | None = None,
        limits: Limits | None = None,
        holdings: Holdings | None = None,
        admin_listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._engine = engine
        self._greet = greet
        self._announces = announces
        self._server = server
        self._listener = listener
        self._sockets = [listener, *admin_listeners]
        self._state = ServerState(ready=False)
        self._keys = server.key_ring(limits or RateLimits())
        holdings = holdings or Holdings.alone()
        bodies = BodyBudget(server.body_budget_bytes, holdings.body_bytes)
        application = _application(engine, server, self._state, registry, page, entries, self._keys, announces, bodies)
        config = uvicorn_config(application, server, engine.config.logging, holdings.connections)
        self._uvicorn = _Uvicorn(config)
        self._certificates = _certificate_watcher(config.ssl, server)
        self._failure: EngineDeadError | None = None

    async def run(self) -> None:
        """Loads the model while serving; returns once a signal stops it. Errors as in `serve`."""
        reload = None if self._keys is None or self._server.api_key_file is None else self._keys.reload
        with signal_handlers(self.stop, reload):
            serving = asyncio.create_task(self._uvicorn.serve(sockets=self._sockets))
            loading = asyncio.create_task(self._engine.start())
            watched = [each for each in (self._certificates, self._keys) if each is not None]
            watchers = [asyncio.create_task(each.run()) for each in watched]
            try:
                await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
                # A signal may come as loading ends: the socket may be closed by now, and no request waits.
                if loading.done() and not self._uvicorn.should_exit:
                    self._on_ready(loading.result())
                    watchers.append(asyncio.create_task(self._watch_engine()))
                await serving
            finally:
                await self._end([serving, loading, *watchers])
        if self._failure is not None:
            raise self._failure

    def _on_ready(self, ready: EngineReady) -> None:
        config = self._engine.config
        if self._engine.metrics is not None:
            for statistics, each in zip(self._engine.metrics.engines, self._engine.client.ready, strict=True):
                statistics.cache_info = cache_facts(config, each)
        tune_garbage_collector()
        self._state.ready = True
        if not self._announces:
            return
        num_tokens, num_requests = cache_room(ready, config.limits)
        engines = f", engines: {len(config.served_engines)}" if config.layout.data > 1 else ""
        seconds = time.monotonic() - STARTED_AT
        logger.info("model       %s (%s)", self._engine.model.name, config.spec.architecture)
        if config.pooling is not None:
            logger.info("output      %s", config.pooling.describe())
        if config.spec.encoder is not None:
            logger.info("encoder     reads up to %s tokens, in one step", f"{config.spec.encoder.max_rows:,}")
        workers = f"workers: {config.layout.num_workers}{engines}"
        logger.info("device      %s, %s, %s", ready.device_name, config.spec.dtype, workers)
        if keeps_nothing(ready.kv_groups):
            logger.info("KV cache    none; a step computes texts of up to %s tokens whole", f"{ready.max_model_len:,}")
        else:
            whole = "; no prefix is cached, as all of a prompt sees its end"
            logger.info(
                "KV cache    %s tokens, room for %.1f requests of %s tokens%s%s",
                f"{num_tokens:,}",
                num_requests,
                f"{ready.max_model_len:,}",
                "".join(map(_state_text, ready.kv_groups)),
                whole if ready.whole_prompts else "",
            )
        url = url_of(self._listener, self._server)
        logger.info("ready       %s after %.1f s", url, seconds)
        if self._greet:
            has_key, task = self._server.needs_key, self._engine.supported_tasks[0]
            print(greeting(url, self._engine.model.name, needs_key=has_key, task=task), flush=True)

    async def _watch_engine(self) -> None:
        """Stops the server when the engine is gone for good, so that a supervisor restarts it."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await self._engine.check_health()
            except EngineDeadError as error:
                if envs.read_flag("KEEP_ALIVE_ON_ENGINE_DEATH"):
                    logger.error("the engine is gone; every request is answered 503: %s", error)
                    return
                self._failure = error
                self._uvicorn.should_exit = True
                return

    def stop(self) -> None:
        """Handles SIGTERM and SIGINT. The second signal waits for nothing."""
        if self._uvicorn.should_exit:
            self._state.stop()
            self._uvicorn.force_exit = True
            return
        timeout = self._server.shutdown_timeout
        logger.info(
            "stopping: requests in flight: %d; seconds that they get to finish: %d", self._state.num_in_flight, timeout
        )
        self._uvicorn.should_exit = True
        self._state.drain()
        if timeout:
            asyncio.get_running_loop().call_later(timeout, self._state.stop)
        else:
            self._state.stop()

    def stop_at_once(self) -> None:
        """Stops as a second signal does."""
        for _ in range(2):
            self.stop()

    async def _end(self, tasks: list["asyncio.Task[None] | asyncio.Task[EngineReady]"]) -> None:
        self._state.stop()
        self._uvicorn.should_exit = True
        serving, *others = tasks
        for task in others:
            task.cancel()
        await asyncio.gather(serving, *others, return_exceptions=True)
        await self._engine.aclose()  # before the signal handlers go: a second Ctrl-C works


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, which would end the process with the signal instead of 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _application(
    engine: AsyncLLM,
    server: ServerConfig,
    state: ServerState,
    registry: CollectorRegistry | None,
    page: MetricsPage | None,
    entries: StoredEntries | None,
    keys: KeyRing | None,
    announces: bool,
    bodies: BodyBudget,
) -> RequestObserver:
    disable_created_metrics()  # a needless timestamp for every counter
    registry = registry or CollectorRegistry()
    app = create_app(
        engine, server, state=state, registry=registry, page=page, entries=entries, keys=keys, announces=announces
    )
    return RequestObserver(
        wrapped(app, server.middleware),
        HttpMetrics(registry),
        request_id_headers=server.enable_request_id_headers,
        request_timeout=envs.read_float("HTTP_TIMEOUT_REQUEST"),
        root_path=server.path_prefix,
        has_cors=bool(server.allowed_origins),
        names_requests=engine.config.logging.formatter == "json",
        audit=None if server.audit_log_path is None else AuditLog(server.audit_log_path),
        bodies=bodies,
    )


def _certificate_watcher(context: ssl.SSLContext | None, server: ServerConfig) -> CertificateWatcher | None:
    if context is None or server.ssl_certfile is None or not server.enable_ssl_refresh:
        return None
    return CertificateWatcher(context, server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs)


def _state_text(group: KVGroupSpec) -> str:
    """A log line's part about the recurrent layers' state of each request; empty for other layers."""
    if not group.is_recurrent:
        return ""
    snapshots = f", copied every {group.interval} tokens" if group.interval else ""
    return f"; a state of {group.state_bytes:,} bytes for each request{snapshots}"

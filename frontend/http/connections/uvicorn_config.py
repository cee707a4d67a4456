"""uvicorn's configuration: connections, TLS, and its logs, the access log among them."""

import functools
import logging
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from litestar.types import ASGIApp

from quire.core import envs
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig
from quire.frontend.http.connections.connection import HttpConnection
from quire.frontend.http.connections.listener import most_connections
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.tally import Tally
from quire.frontend.http.websockets import WEBSOCKET_PATHS

GRACE_SECONDS = 5
"""Time after the shutdown timeout for writing the last answers; then connections are cut."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""Largest message of a websocket."""

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_LEVELS_WITH_ACCESS = ("info", "debug", "trace")


def uvicorn_config(app: ASGIApp, server: ServerConfig, log_config: LoggingConfig, connections: Tally) -> uvicorn.Config:
    """The configuration, with TLS files read.

    Args:
        connections: counts those of all servers of one command.

    Raises:
        ConfigError: the TLS files cannot be used.
    """
    access_log = server.uvicorn_log_level in _LEVELS_WITH_ACCESS and not server.disable_uvicorn_access_log
    protocol: Any = functools.partial(
        HttpConnection,
        request_timeout=envs.read_float("HTTP_TIMEOUT_REQUEST"),
        max_head_bytes=server.h11_max_incomplete_event_size,
        max_headers=server.h11_max_header_count,
        max_connections=server.max_connections,
        max_own_connections=most_connections(),
        connections_of_all=connections,
        websocket=_websocket_protocol(),
        websocket_paths=frozenset(
            f"{prefix}{path}".encode() for prefix in {"", server.path_prefix} for path in WEBSOCKET_PATHS
        ),
    )
    application: Any = app
    config = uvicorn.Config(
        application,
        http=protocol,
        ws="none",  # HttpConnection hands websockets on by itself
        ws_max_size=MAX_MESSAGE_BYTES,
        loop="none",
        lifespan="off",
        log_config=None,
        log_level=server.uvicorn_log_level,
        access_log=access_log,
        server_header=False,
        proxy_headers=access_log,  # only the access log shows clients' addresses
        timeout_keep_alive=int(envs.read_float("HTTP_TIMEOUT_KEEP_ALIVE")),
        timeout_graceful_shutdown=server.shutdown_timeout + GRACE_SECONDS,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        ssl_ciphers=server.ssl_ciphers or "TLSv1",
    )
    if server.uvicorn_log_level == "info":  # Quire's own lines say the same as uvicorn's at this level
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if log_config.is_wanted and log_config.file is None:
        _share_handlers(log_config, access_log=access_log)
    unlogged = (server.disable_access_log_for_endpoints or "").split(",")
    logging.getLogger("uvicorn.access").filters = [_PathFilter(frozenset(path.strip() for path in unlogged))]
    try:
        config.load()  # before the model is loaded
    except OSError as error:  # ssl's errors are OSErrors
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and its companions cannot be used: {error}. Both it and "
            "--ssl-keyfile must be PEM files, of one certificate without a password."
        ) from None
    return config


def _websocket_protocol() -> Any:
    """The protocol of websockets; None without the package for it, which the extra `media` brings."""
    try:
        from quire.frontend.http.connections.websocket import WebSocketConnection
    except ImportError:
        return None
    return WebSocketConnection


def _share_handlers(log_config: LoggingConfig, *, access_log: bool) -> None:
    """Gives uvicorn's loggers the handlers of Quire's."""
    handlers = logging.getLogger("quire").handlers
    for name in ("uvicorn.error", "uvicorn.asgi", *(["uvicorn.access"] if access_log else [])):
        logger = logging.getLogger(name)
        logger.handlers = list(handlers)
        logger.propagate = not handlers
    if access_log and handlers and log_config.formatter == "text":
        handler = logging.StreamHandler()
        handler.setFormatter(_AccessFormatter(handlers[0].formatter or logging.Formatter()))
        logging.getLogger("uvicorn.access").handlers = [handler]


class _AccessFormatter(logging.Formatter):
    """Writes uvicorn's lines as Quire's, with the status in words at their end, as vLLM does.

    uvicorn's own formatter copies each record, which costs a measurable share of short answers.
    """

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """The line; the record's arguments are (client, method, path, version, status)."""
        assert isinstance(record.args, tuple)
        status = record.args[4]
        return f"{self._lines.format(record)} {_PHRASES.get(cast(int, status), '')}"


class _PathFilter(logging.Filter):
    """Leaves requests of some paths out of the access log."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record's path is logged. Its arguments are (client, method, path, version, status)."""
        assert isinstance(record.args, tuple)
        return str(record.args[2]).partition("?")[0] not in self._paths

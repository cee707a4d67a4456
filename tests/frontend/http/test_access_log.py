"""The access log: whose lines they are, and what each says."""

import logging

import pytest

from quire.core.logging import LoggingConfig, configure
from quire.frontend.http.connections.uvicorn_config import uvicorn_config
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.tally import Tally


async def app(scope: object, receive: object, send: object) -> None:
    raise NotImplementedError


def test_a_line_names_the_process_that_answered(capsys: pytest.CaptureFixture[str]) -> None:
    config = LoggingConfig(log_level="INFO")
    configure("serve-3", config)
    uvicorn_config(app, ServerConfig(), config, Tally())  # type: ignore[arg-type]
    arguments = ("127.0.0.1:4", "GET", "/health", "1.1", 404)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *arguments)
    assert capsys.readouterr().err.endswith('INFO    serve-3  127.0.0.1:4 - "GET /health HTTP/1.1" 404 Not Found\n')

"""The user's own ASGI middleware, by import path (`--middleware`)."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from litestar.types import ASGIApp

from quire.core.errors import ConfigError


def wrapped(app: ASGIApp, paths: list[str]) -> ASGIApp:
    """`app` inside the middleware that `paths` name, the last one outermost.

    A class is called with the application and makes an ASGI application. A coroutine function is Starlette's
    `(request, call_next)`, and needs Starlette.

    Raises:
        ConfigError: a path names nothing that can be imported, or no middleware.
    """
    for path in paths:
        app = _load(path)(app)
    return app


def _load(path: str) -> Callable[[ASGIApp], ASGIApp]:
    found = _import(path)
    if inspect.isclass(found):
        return cast(Callable[[ASGIApp], ASGIApp], found)
    if inspect.iscoroutinefunction(found):
        return _from_function(path, found)
    raise ConfigError(f"--middleware: {path} is neither a class nor a coroutine function.")


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"--middleware: {path!r} is no import path; write module.Class or module.function.")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"--middleware: {path} cannot be imported: {type(error).__name__}: {error}. Is its folder in PYTHONPATH?"
        ) from error


def _from_function(path: str, function: Callable[..., Any]) -> Callable[[ASGIApp], ASGIApp]:
    try:
        from starlette.middleware.base import BaseHTTPMiddleware  # imported here: only such functions need Starlette
    except ImportError:
        raise ConfigError(
            f"--middleware: {path} is a function, and functions take Starlette's requests: `pip install starlette`, "
            "or write an ASGI class."
        ) from None
    return lambda app: cast(ASGIApp, BaseHTTPMiddleware(cast(Any, app), dispatch=function))

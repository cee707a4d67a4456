"""The audit log: who asked what, and what it took, in one JSON line for each HTTP request. It has no prompts."""

import os
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar.types import HTTPScope, WebSocketScope
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.frontend.keys.caller import current_owner
from quire.frontend.requests.usage import CallUsage

logger = get_logger(__name__)

MAX_FIELD = 200
"""Characters that a line keeps of a path or a name from the client."""


class AuditEntry(Struct):
    """A line: all times in seconds, all tokens of all requests to the engine that the HTTP request made."""

    time: str  # when the request came, in UTC
    request_id: str
    client: str | None
    key: str | None
    method: str
    path: str
    route: str | None
    status: int
    is_whole: bool  # else the client left, or the server, before the answer's end
    seconds: float
    request_bytes: int
    response_bytes: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: list[str]


class AuditLog:
    """Appends lines to a file, each with one system call, so that several processes may share it.

    Args:
        place: the file; - is the standard output.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._encode = msgspec.json.Encoder().encode
        self._has_failed = False
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.dup(1) if place == "-" else os.open(place, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"--audit-log-path: cannot write {place!r}: {error.strerror}.") from None

    def add(
        self,
        scope: HTTPScope | WebSocketScope,
        *,
        request_id: str,
        method: str,
        status: int,
        is_whole: bool,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
        usage: CallUsage,
    ) -> None:
        """Writes the line of a request that has ended. A disk that is full loses lines, and no request."""
        facts: dict[str, Any] = scope  # type: ignore[assignment]
        client = facts.get("client")
        entry = AuditEntry(
            time=datetime.fromtimestamp(time.time() - seconds, UTC).isoformat(timespec="milliseconds"),
            request_id=request_id,
            client=None if not client else f"{client[0]}:{client[1]}",
            key=current_owner() or None,
            method=method[:MAX_FIELD],
            path=facts["path"][:MAX_FIELD],
            route=facts.get("path_template"),
            status=status,
            is_whole=is_whole,
            seconds=round(seconds, 6),
            request_bytes=request_bytes,
            response_bytes=response_bytes,
            num_requests=usage.num_requests,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            finish_reasons=usage.finish_reasons,
        )
        try:
            os.write(self._file, self._encode(entry) + b"\n")
        except OSError as error:
            if not self._has_failed:
                logger.error("the audit log %s cannot be written, and loses lines: %s", self._place, error.strerror)
            self._has_failed = True

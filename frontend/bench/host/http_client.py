"""An HTTP client with little overhead: it counts the tokens of a streamed completion without parsing its events.

A full HTTP client spends more time on an event than the server does. On a shared machine it would measure itself.
"""

import asyncio
import re
from typing import cast

import msgspec

from quire.core.errors import QuireError

END_OF_BODY = b"\r\n0\r\n\r\n"
TAIL_BYTES = 2048  # enough for the last events, which include the usage
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


class CompletionConnection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._tail = b""

    @classmethod
    async def open(cls, port: int) -> "CompletionConnection":
        """Connects to a server on this host."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def complete(self, body: dict) -> int:
        """Sends a request for a streamed completion with usage; returns the number of its tokens.

        Raises:
            QuireError: the server refused the request, or closed the connection.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise QuireError("the server hung up between two requests")
        self._tail = b""
        self._answer = asyncio.get_running_loop().create_future()
        content = msgspec.json.encode(body)
        head = "POST /v1/completions HTTP/1.1\r\nHost: l\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        tail = await self._answer
        usage = _USAGE.findall(tail)
        if not usage:
            raise QuireError(f"the stream ended without usage: {tail[-300:].decode(errors='replace')}")
        return int(usage[-1])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"the server answered {data[:500].decode(errors='replace')}")
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._tail.endswith(END_OF_BODY) and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._tail)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the server hung up: {error or 'end of file'}")

    def _fail(self, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(QuireError(message))

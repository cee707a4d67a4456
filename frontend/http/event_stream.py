"""Server-sent events: sends frames as they come, and ends at once when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from litestar.types import Receive, Scope, Send

from quire.core.errors import UnavailableError
from quire.frontend.http.errors import ClientGoneError, ErrorReporter, Problem
from quire.frontend.http.server_state import ServerState

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
UNDECIDED_SECONDS = 1.0
"""Wait of the headers for a frame after an `Accepted`, so that an engine's refusal gets its own status."""
_LOOKS_PER_SILENCE = 4
"""Checks for silence in one keep-alive interval; a silence may last one part longer than the interval."""


class Accepted(bytes):
    """A frame that says that the request is with the engine: events, if any, that open the stream.

    They follow the headers after `UNDECIDED_SECONDS` at the latest, so that no client waits long for a first byte. An
    empty one is replaced by a keep-alive, if the stream has any.
    """


ACCEPTED = Accepted()

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event_frame(data: bytes, kind: str | None = None) -> bytes:
    """Writes one event: its `data`, JSON in one line, and the name of its kind in protocols that give it one."""
    if kind is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def error_frame(problem: Problem) -> bytes:
    """An error as chat and text completions write it, and the end of the stream."""
    return event_frame(problem.body()) + DONE


class EventStream:
    """An ASGI answer made of `frames`, each one or more whole events.

    Args:
        frames: closed when the client disconnects. An exception becomes an HTTP error if nothing was sent yet, and an
            error event afterwards. Nothing is sent before the first frame, however long a grammar is compiled.
        keep_alive_seconds: silence after which `keep_alive` is sent; 0 sends none.
        keep_alive: the protocol's event without content.
        error_frame: makes the protocol's event of an error.
    """

    __slots__ = (
        *("_frames", "_state", "_errors", "_keep_alive_seconds", "_keep_alive_frame", "_error_frame", "_started"),
        *("_opening", "_early", "_num_sent", "_helpers"),
    )

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        state: ServerState,
        errors: ErrorReporter,
        *,
        keep_alive_seconds: float = 0,
        keep_alive: bytes = KEEP_ALIVE,
        error_frame: Callable[[Problem], bytes] = error_frame,
    ) -> None:
        self._frames = frames
        self._state = state
        self._errors = errors
        self._keep_alive_seconds = keep_alive_seconds
        self._keep_alive_frame = keep_alive
        self._error_frame = error_frame
        self._started = False
        self._opening = ACCEPTED
        self._early: asyncio.Task[None] | None = None  # sends the headers and the opening before there is a frame
        self._num_sent = 0
        self._helpers: list[asyncio.Task[None]] = []  # end with the stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._state.run(self._write(scope, send), receive)
        except ClientGoneError:
            if not self._started:
                raise
            return
        except UnavailableError as error:
            if not self._started:
                raise
            await self._send_error(error, scope, send)
        if self._started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, scope: Scope, send: Send) -> None:
        undecided: asyncio.TimerHandle | None = None
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    if self._started:  # the usual case
                        await self._early_start()
                        await self._send(frame, send)
                    elif isinstance(frame, Accepted):
                        self._opening = frame
                        undecided = asyncio.get_running_loop().call_later(UNDECIDED_SECONDS, self._start_early, send)
                    else:
                        await self._start(send, self._opening + frame)
                await self._early_start()
                if not self._started:
                    await self._start(send, self._opening)
        except Exception as error:
            if not self._started:
                raise
            await self._early_start()
            await self._send_error(error, scope, send)
        finally:
            if undecided is not None:
                undecided.cancel()
            for helper in self._helpers:
                helper.cancel()

    def _start_early(self, send: Send) -> None:
        if not self._started:
            opening = self._opening or (self._keep_alive_frame if self._keep_alive_seconds else b"")
            self._started = True  # now, for a frame may come before the task runs
            self._early = asyncio.create_task(self._start(send, opening))
            self._helpers.append(self._early)

    async def _early_start(self) -> None:
        """Waits for the headers that are sent before there is a frame, if they are."""
        if self._early is not None:
            early, self._early = self._early, None
            await early

    async def _start(self, send: Send, first: bytes) -> None:
        """Sends the headers and the first frames."""
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if first:
            await self._send(first, send)
        if self._keep_alive_seconds:
            self._helpers.append(asyncio.create_task(self._keep_alive(send)))

    def _send(self, frame: bytes, send: Send) -> Awaitable[None]:
        self._num_sent += 1
        return send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _send_error(self, error: Exception, scope: Scope, send: Send) -> None:
        problem = self._errors.report(error, f"{scope['method']} {scope['path']}")  # type: ignore[typeddict-item]
        await self._send(self._error_frame(problem), send)

    async def _keep_alive(self, send: Send) -> None:
        seen, num_looks = self._num_sent, 0
        while True:
            await asyncio.sleep(self._keep_alive_seconds / _LOOKS_PER_SILENCE)
            num_looks = num_looks + 1 if self._num_sent == seen else 0
            if num_looks == _LOOKS_PER_SILENCE:
                await self._send(self._keep_alive_frame, send)
                num_looks = 0
            seen = self._num_sent

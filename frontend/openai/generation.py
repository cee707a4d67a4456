"""What chat and text completions share: ids, usage, and reading the outputs of several prompts at once."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from quire.core.logging import get_logger
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.frontend.openai.schema import GenerationRequest
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.turns import in_turns

logger = get_logger(__name__)
T = TypeVar("T")

MAX_ID_CHARACTERS = 200
INLINE_CHOICES = 64
"""Answers of more choices are put together in a thread."""
TASKS_PER_TURN = 64
"""Of a request's tasks that begin or end in a turn of the event loop."""


class Reply(msgspec.Struct, kw_only=True):
    """What every part of one answer repeats, and how it is to be told."""

    id: str
    model: str
    created: int
    cache_details: bool  # usage tells how many prompt tokens were cached
    include_usage: bool  # a stream ends with usage
    continuous_usage: bool  # every event of a stream carries usage, of its choice

    @classmethod
    def to(cls, request: GenerationRequest, reply_id: str, model: str, server: ServerConfig) -> "Reply":
        """How to answer `request`."""
        options = request.stream_options
        include_usage = server.enable_force_include_usage or bool(options and options.include_usage)
        return cls(
            id=reply_id,
            model=model,
            created=int(time.time()),
            cache_details=server.enable_prompt_tokens_details,
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        )

    def usage(
        self, prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
    ) -> Usage:
        """Token counts as the API tells them; `reasoning_tokens` are those of `completion_tokens` that are known."""
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens) if self.cache_details else None,
            completion_tokens_details=None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens),
        )


def choose_id(prefix: str, request: GenerationRequest, header: str | None) -> str:
    """The answer's id: from the X-Request-Id header, else the body's request_id, else fresh."""
    return f"{prefix}-{(header or request.request_id or uuid.uuid4().hex)[:MAX_ID_CHARACTERS]}"


def engine_id(reply_id: str, prompt_index: int = 0) -> str:
    """Id of one prompt inside the engine: unique, even when a client uses its id twice."""
    return f"{reply_id}-{prompt_index}-{uuid.uuid4().hex[:8]}"


def log_prompt(request_id: str, prompt: str | list[int], max_length: int | None) -> None:
    """Logs a prompt, cut to `max_length` characters or token ids, when the log shows details."""
    logger.debug("request %s: prompt %r", request_id, prompt if max_length is None else prompt[:max_length])


def event(chunk: msgspec.Struct, encoder: msgspec.json.Encoder) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + encoder.encode(chunk) + b"\n\n"


class TextEvent:
    """An event that differs from the one before only by its text: everything around the text is encoded once.

    Args:
        sample: the event with an empty text.
        field: the text's key. In JSON a quote within a string is escaped, so `"field":""` cannot be part of one.
    """

    __slots__ = ("_encode", "_head", "_tail")

    def __init__(self, sample: bytes, field: str, encoder: msgspec.json.Encoder) -> None:
        key = f'"{field}":'.encode()
        head, self._tail = sample.split(key + b'""')
        self._head = head + key
        self._encode = encoder.encode

    def fill(self, text: str) -> bytes:
        """The event with `text`."""
        return b"%b%b%b" % (self._head, self._encode(text), self._tail)


class OutputStream(Protocol):
    """The outputs of one prompt: sampled ones, or those of a beam search."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    def close(self) -> None:
        """Ends what still runs. Harmless at the end."""


class _Single(AsyncIterator[tuple[int, RequestOutput]]):
    """What `merge` makes of one stream: nearly always, and with every token."""

    __slots__ = ("_outputs",)

    def __init__(self, stream: OutputStream) -> None:
        self._outputs = aiter(stream)

    async def __anext__(self) -> tuple[int, RequestOutput]:
        return 0, await anext(self._outputs)

    async def aclose(self) -> None:
        """The caller closes the stream."""


def merge(streams: Sequence[OutputStream]) -> "_Single | AsyncGenerator[tuple[int, RequestOutput], None]":
    """(prompt index, output) of all streams as they come.

    Raises:
        QuireError: the first that any stream raises; the others are left for the caller to close.
    """
    return _Single(streams[0]) if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
        except Exception as error:  # handed on: the reader raises it
            await queue.put(error)
        await queue.put(None)

    pumps: list[asyncio.Task[None]] = []
    try:
        async for index, stream in in_turns(enumerate(streams), most=TASKS_PER_TURN):
            pumps.append(asyncio.create_task(pump(index, stream)))
        unfinished = len(streams)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        await cancel(pumps)


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Ends tasks whose results nobody waits for, waits until they have ended, and empties the list.

    An error keeps the variables of every function that it went through. Were the tasks among them, all of them would be
    freed at once, whenever the garbage collector comes.
    """
    async for task in in_turns(tasks, most=TASKS_PER_TURN):
        task.cancel()
    async for task in in_turns(_taken(tasks)):
        if not task.done():
            await asyncio.wait([task])


async def close(streams: list[OutputStream]) -> None:
    """Ends what still runs of a request, and empties the list, as `cancel` does."""
    async for stream in in_turns(_taken(streams)):
        stream.close()


def _taken(items: list[T]) -> Iterator[T]:
    while items:
        yield items.pop()

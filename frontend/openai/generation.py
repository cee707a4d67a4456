"""Ids, usage and server-sent events, which the answers of chat and text completions share."""

import time
import uuid

import msgspec

from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from quire.frontend.openai.schema import GenerationRequest
from quire.frontend.parsing.events import Usage
from quire.frontend.requests.ids import MAX_ID_CHARACTERS

INLINE_CHOICES = 64
"""Answers with more choices are put together in a thread."""


class Reply(msgspec.Struct, kw_only=True):
    """The fields that every part of one answer repeats, and how much usage the parts report."""

    id: str
    model: str
    created: int
    cache_details: bool  # usage tells how many prompt tokens were cached
    include_usage: bool  # a stream ends with usage
    continuous_usage: bool  # every event of a stream carries usage, of its choice

    @classmethod
    def to(cls, request: GenerationRequest, reply_id: str, model: str, server: ServerConfig) -> "Reply":
        """The reply to `request`."""
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

    def usage(self, counted: Usage) -> CompletionUsage:
        """Token counts as the API tells them."""
        reasoning = counted.reasoning_tokens
        return CompletionUsage(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            total_tokens=counted.prompt_tokens + counted.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(counted.cached_tokens) if self.cache_details else None,
            completion_tokens_details=None if reasoning is None else CompletionTokensDetails(reasoning),
        )


def choose_id(prefix: str, request: GenerationRequest, header: str | None) -> str:
    """The answer's id: from the X-Request-Id header, else the body's request_id, else fresh."""
    return f"{prefix}-{(header or request.request_id or uuid.uuid4().hex)[:MAX_ID_CHARACTERS]}"


def event(chunk: msgspec.Struct, encoder: msgspec.json.Encoder) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + encoder.encode(chunk) + b"\n\n"


class TextEvent:
    """An event that differs from the one before only in its text. Everything around the text is encoded once.

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

"""Ids, usage and server-sent events, which the answers of chat and text completions share."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.event_stream import event_frame
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import (
    ChatChunkChoice,
    CompletionChunkChoice,
    CompletionTokensDetails,
    CompletionUsage,
    PromptTokensDetails,
)
from quire.frontend.openai.fingerprint import fingerprint
from quire.frontend.openai.logprobs import LogprobFormatter
from quire.frontend.openai.schema import GenerationRequest
from quire.frontend.parsing.events import Usage

INLINE_CHOICES = 64
"""Answers with more choices are assembled in a thread."""


class Reply(msgspec.Struct, kw_only=True):
    """The fields that every part of one answer repeats, and the usage that the parts report."""

    id: str
    model: str
    created: int
    cache_details: bool  # usage has the number of cached prompt tokens
    include_usage: bool  # a stream ends with usage
    continuous_usage: bool  # every event of a stream carries usage, of its choice
    fingerprint: str | None = None

    def fingerprint_of(self, choices: Sequence[ChatChunkChoice | CompletionChunkChoice]) -> str | UnsetType:
        """The fingerprint, in an event of a stream that may be the last: with usage, or else one that ends a choice."""
        ends = not choices or (not self.include_usage and choices[0].finish_reason is not None)
        return self.fingerprint if ends and self.fingerprint is not None else UNSET

    def usage(self, counted: Usage) -> CompletionUsage:
        """Token counts in the API's form."""
        reasoning, prediction = counted.reasoning_tokens, counted.prediction
        details = None
        if reasoning is not None or prediction is not None:
            details = CompletionTokensDetails(
                UNSET if reasoning is None else reasoning, *(prediction or (UNSET, UNSET))
            )
        return CompletionUsage(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            total_tokens=counted.prompt_tokens + counted.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(counted.cached_tokens) if self.cache_details else None,
            completion_tokens_details=details,
        )


class Replies:
    """Checks requests, and begins the replies to them.

    Args:
        prefix: of the answers' ids.
        reports_cached: usage has the number of cached tokens, even without the server's option for it.
    """

    def __init__(self, engine: AsyncLLM, server: ServerConfig, prefix: str, *, reports_cached: bool = False) -> None:
        self._model = engine.model
        self._tokenizer = engine.tokenizer
        self._server = server
        self._prefix = prefix
        self._reports_cached = reports_cached or server.enable_prompt_tokens_details
        self._fingerprint = fingerprint(server, engine.config)

    def begin(self, request: GenerationRequest, headers: ClientHeaders) -> Reply:
        """The reply to `request`.

        Raises:
            RequestError: a field contradicts another, or another model is asked for.
        """
        request.check()
        self._model.choose(request.model)
        asked, forced = request.stream_options, self._server.enable_force_include_usage
        include_usage = forced or bool(asked and asked.include_usage)
        return Reply(
            id=f"{self._prefix}-{headers.choose_id(request.request_id)}",
            model=self._model.chosen_name,
            created=int(time.time()),
            cache_details=self._reports_cached,
            include_usage=include_usage,
            continuous_usage=forced or (include_usage and bool(asked and asked.continuous_usage_stats)),
            fingerprint=self._fingerprint,
        )

    def formatter(self, request: GenerationRequest, num_top: int | None) -> LogprobFormatter:
        """The formatter of the reply's log-probabilities, with `num_top` of the likeliest tokens."""
        asked = request.return_tokens_as_token_ids
        as_ids = self._server.return_tokens_as_token_ids if asked is None else asked
        return LogprobFormatter(self._tokenizer, num_top or 0, as_ids=as_ids)


def event(chunk: msgspec.Struct, encoder: msgspec.json.Encoder) -> bytes:
    """A chunk as a server-sent event."""
    return event_frame(encoder.encode(chunk))


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

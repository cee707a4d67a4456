"""Counts the tokens of the requests that one caller opens, such as the handler of one HTTP request."""

from contextvars import ContextVar
from typing import NamedTuple

from msgspec import Struct


class StreamUsage(NamedTuple):
    """The tokens of one request, and the reasons why its sequences ended."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: list[str]


class CallUsage(Struct):
    """The sum over the requests of one call."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: list[str] = []

    def add(self, usage: StreamUsage) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += usage.num_prompt_tokens
        self.num_cached_tokens += usage.num_cached_tokens
        self.num_output_tokens += usage.num_output_tokens
        self.finish_reasons = sorted({*self.finish_reasons, *usage.finish_reasons})


CALL_USAGE: ContextVar[CallUsage | None] = ContextVar("call_usage", default=None)
"""The usage of the running call; None where nobody counts."""

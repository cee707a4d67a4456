"""Events that a model's output consists of: text, reasoning and tool calls, then the end.

This folder makes the first six out of text; each HTTP protocol renders them in its own words. For every choice
the order is: any mix of deltas, each tool call from its start to its end without another between, one `Finish`.
"""

from typing import Literal

from msgspec import Struct


class Event(Struct, frozen=True, gc=False):
    """One step of an answer, which each protocol writes in its own form."""


class TextDelta(Event, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class ReasoningDelta(Event, frozen=True, gc=False):
    """More of the reasoning that precedes the answer."""

    text: str


class ToolCallStart(Event, frozen=True, gc=False):
    """The model calls a function; `index` counts the calls of this choice from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(Event, frozen=True, gc=False):
    """More of a call's arguments: the fragments of one call join up to one JSON object.

    They are the model's own text where its format has JSON. An answer that was cut short may end within the object.
    """

    index: int
    text: str


class ToolCallEnd(Event, frozen=True, gc=False):
    """The end of a call.

    Attributes:
        is_cut: the answer ended before the mark that closes the call.
        is_broken: the answer ended before the arguments did.
    """

    index: int
    is_cut: bool = False
    is_broken: bool = False


class Finish(Event, frozen=True, gc=False):
    """The choice ended: `reason` in OpenAI's words, and the stop string or token id that ended it."""

    reason: Literal["stop", "length", "tool_calls", "abort", "error", "repetition"]
    stop_reason: int | str | None = None


class Usage(Event, frozen=True, gc=False):
    """Tokens of the whole request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # of the completion's; None without a parser of reasoning
    prediction: tuple[int, int] | None = None  # of its tokens, those in the completion and the others; None without one

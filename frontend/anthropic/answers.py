"""A message and its blocks, as Anthropic spells them."""

from typing import Any, Literal

from msgspec import Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str = ""


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning before its answer. Quire checks no signatures, so `signature` is empty."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of one of the client's functions."""

    id: str
    name: str
    input: Any = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct, kw_only=True, omit_defaults=True):
    """Tokens of a message. If cached tokens are reported, `input_tokens` does not include them."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class MessageAnswer(Struct, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class ContextManagement(Struct):
    """Tokens before any edit of the conversation."""

    original_input_tokens: int


class TokenCount(Struct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int
    context_management: ContextManagement


class ModelInfo(Struct, kw_only=True):
    """Answer of GET /v1/models/{id} for Anthropic's clients; `created_at` is when the server started."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class ModelPage(Struct, kw_only=True):
    """Answer of GET /v1/models for Anthropic's clients; one page holds all."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str


class ThreadDetails(Struct):
    """Details of an error after which a client can go on without a thread."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: tuple[Literal["thread"]] = ("thread",)


class ErrorCause(Struct, omit_defaults=True):
    """An error's type and message."""

    type: str
    message: str
    details: ThreadDetails | None = None


class ErrorAnswer(Struct, kw_only=True):
    """Body of every answer that is not a success."""

    type: Literal["error"] = "error"
    error: ErrorCause

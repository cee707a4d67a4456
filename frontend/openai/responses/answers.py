"""A response and its items, as OpenAI spells them."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from quire.frontend.openai.answers import TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str = ""


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """The model's answer, or a part of it."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of one of the client's functions; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class CustomCallItem(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of one of the client's custom tools; `input` is the text that it is called with."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(Struct):
    """Prompt tokens that the prefix cache already held.

    vLLM's lists of the tokens of each turn are absent here and in the output's details. A response is one turn, and
    OpenAI's agents library for JavaScript accepts only integers.
    """

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Tokens that went into reasoning."""

    reasoning_tokens: int = 0
    tool_output_tokens: int = 0


class ResponseUsage(Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct):
    """The reason of a response's failure."""

    code: str
    message: str


class Incompleteness(Struct):
    """The reason of a response's early end."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseConversation(Struct):
    """The conversation that a response belongs to."""

    id: str


class AppliedCacheOptions(Struct):
    """A request's options of prompt caching, with OpenAI's defaults. They have no effect: caching is always on."""

    mode: str
    ttl: str
    comparison_response_id: str | None


class RawMessage(Struct, kw_only=True, tag_field="type", tag="raw_message_tokens"):
    """The model's input or output, as text and as tokens."""

    message: str
    tokens: list[int]


class Response(Struct, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    conversation: ResponseConversation | None = None
    error: ResponseFailure | None = None
    incomplete_details: Incompleteness | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: AppliedCacheOptions | UnsetType = UNSET
    prompt_cache_retention: str | None = None
    reasoning: Any = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    input_messages: list[RawMessage] | UnsetType = UNSET  # vLLM's, as the next one: where the request asks for them
    output_messages: list[RawMessage] | UnsetType = UNSET


class InputTokenCount(Struct, kw_only=True):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class Compaction(Struct, kw_only=True):
    """Answer of POST /v1/responses/compact: the remaining messages, and one item of type `compaction`."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class Conversation(Struct, kw_only=True):
    """A conversation that the server keeps."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str] = {}


class DeletedConversation(Struct, kw_only=True):
    """Answer of DELETE /v1/conversations/{id}."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True

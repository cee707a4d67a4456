"""Response bodies, as OpenAI and vLLM spell them."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from quire.frontend.outputs import Logprob


class PromptTokensDetails(Struct):
    """Prompt tokens that the prefix cache already held."""

    cached_tokens: int


class CompletionTokensDetails(Struct, omit_defaults=True):
    """Tokens of the reasoning, whether or not the answer shows it, and those of a prediction, in the answer and not."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class CompletionUsage(Struct, kw_only=True):
    """Tokens counted over all choices."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None  # of reasoning, or a prediction


# ------------------------------------------------------------------------------------------------------------ logprobs


class TopLogprob(Struct):
    """One of the likeliest tokens at a position. `bytes` also spells tokens that are parts of characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """The sampled token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of a chat choice, an entry per token."""

    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    """Log-probabilities of a text choice: columns of one entry per token. Offsets are in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # None for the first token of an echoed prompt
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


# ---------------------------------------------------------------------------------------------------------------- chat


class FunctionCall(Struct):
    """The function that the model calls; `arguments` is JSON text."""

    name: str
    arguments: str


class CustomCall(Struct):
    """The custom tool that the model calls, and the text that it is called with."""

    name: str
    input: str


class ToolCall(Struct, kw_only=True, tag_field="type", tag="function"):
    """One call of a function in a message."""

    id: str
    function: FunctionCall


class CustomToolCall(Struct, kw_only=True, tag_field="type", tag="custom"):
    """One call of a custom tool in a message."""

    id: str
    custom: CustomCall


class ChatMessage(Struct, kw_only=True):
    """The model's message; `tool_calls` is left out without calls.

    Reasoning has two names: vLLM's, and the one that older clients read.
    """

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class WeightVersionSpan(Struct):
    """The weights that sampled the tokens from `start` to before `end` of a choice."""

    version: str
    start: int
    end: int


class ChatChoice(Struct, kw_only=True):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: CompletionUsage
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Struct, kw_only=True, omit_defaults=True):
    """The new part of a call: first the name, then pieces of the arguments."""

    name: str | None = None
    arguments: str | None = None


class CustomDelta(Struct, kw_only=True, omit_defaults=True):
    """The new part of a call of a custom tool: first the name, then pieces of the text."""

    name: str | None = None
    input: str | None = None


class ToolCallDelta(Struct, kw_only=True, omit_defaults=True):
    """The new part of one call in a message, in `function` or `custom`; `id` and `type` come with the name."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class ChatDelta(Struct, kw_only=True, omit_defaults=True):
    """The new part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct, kw_only=True):
    """The new part of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a chat stream; the last one before [DONE] has no choices but usage, when asked for.

    Events that may be the last carry the fingerprint: the one with usage, or else each that ends a choice.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---------------------------------------------------------------------------------------------------------------- text


class CompletionChoice(Struct, kw_only=True):
    """One of n texts for one of the prompts; `index` counts through all of them."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class TextCompletion(Struct, kw_only=True):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: CompletionUsage


class CompletionChunkChoice(Struct, kw_only=True):
    """The new part of one text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class CompletionChunk(Struct, kw_only=True):
    """One event of a text stream; usage and fingerprint as in a `ChatChunk`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET


# --------------------------------------------------------------------------------------------------------- other routes


class ModelPermission(Struct, kw_only=True):
    """Permissions for a model, as OpenAI's API once had them; clients from that time require them."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """One name that clients may use."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]
    task: str | UnsetType = UNSET  # of a model that makes vectors or labels: its first one
    dimensions: int | UnsetType = UNSET  # of its vectors


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(Struct):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    """Answer of POST /detokenize."""

    prompt: str

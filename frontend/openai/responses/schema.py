"""Body of POST /v1/responses: OpenAI's fields and vLLM's additions, each honoured or refused by name.

A request becomes a `ChatInput`, so sampling and tools are handled in one place for all protocols.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.chat.body_fields import read_overrides, read_sampling, refuse_unsupported
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.partly_read import PartlyRead
from quire.frontend.chat.tool_fields import read_tool_set
from quire.frontend.openai.output_format import OutputFields
from quire.frontend.openai.responses.answers import AppliedCacheOptions
from quire.frontend.openai.responses.items import ignored_items
from quire.frontend.openai.responses.tools import OfferedTools, ignored_response_tools
from quire.frontend.refusals.fields import is_usual_verbosity
from quire.frontend.requests.request_fields import check_priority, check_salt

OUTPUT_LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INPUT_IMAGES = "message.input_image.image_url"
CALL_PREFIX = "call_"
"""Prefix of the ids of calls. The items of calls have other ids."""

MAX_METADATA = 16
"""Most entries of `metadata`, as in OpenAI's API."""

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chat completions, and their names in the Responses API."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "prompt": (),
    "previous_input_messages": (),
}
"""Fields that are not supported, and the values of each without effect."""


class ConversationReference(Struct, kw_only=True, forbid_unknown_fields=True):
    """A conversation that the server keeps."""

    id: str


class Reasoning(Struct, kw_only=True, forbid_unknown_fields=True):
    """The effort of reasoning. Reasoning is never summarized, so every summary is empty."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text: free, JSON, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextFormat = msgspec.field(default_factory=TextFormat)
    verbosity: Literal["low", "medium", "high"] | None = None


class PromptCacheOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of prompt caching. The response repeats them; they have no effect here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: bool | None = None

    def applied(self) -> AppliedCacheOptions:
        """The options as a response repeats them."""
        return AppliedCacheOptions(self.mode or "implicit", self.ttl or "30m", self.comparison_response_id)


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. `include_obfuscation` has no effect here; answers list it as ignored."""

    include_obfuscation: bool | None = None


class ResponsesRequest(PartlyRead, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]] = msgspec.field(default_factory=list)
    model: str | None = None
    timeout: float | None = None  # seconds; see `requests/deadline.py`
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationReference | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    request_id: str | None = None
    enable_response_messages: bool | None = None  # add the prompt and the output as text and tokens
    # As in chat completions.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    vllm_xargs: Any = None
    structured_outputs: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    watermarking: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    # Without effect on a private server.
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    # Not supported.
    prompt: Any = None
    previous_input_messages: Any = None

    @property
    def is_stored(self) -> bool:
        """True if the response is stored for later requests."""
        return self.store is not False

    @property
    def ends_unfinished(self) -> bool:
        """True if the input ends with a part of the assistant's message."""
        last = self.input[-1] if self.input and not isinstance(self.input, str) else {}
        is_message = last.get("type", "message") == "message" and last.get("role") == "assistant"
        return is_message and last.get("status") in ("in_progress", "incomplete")

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response belongs to."""
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation

    def includes(self, what: str) -> bool:
        """True if `include` names `what`."""
        return what in (self.include or ())

    def ignored_parts(self) -> Iterator[str]:
        """Yields fields about tools that a server would run, images, padding, prewarming, and an unknown verbosity."""
        if self.text is not None and not is_usual_verbosity(self.text.verbosity):
            yield "text.verbosity"
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            yield "stream_options.include_obfuscation"
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            yield "prompt_cache_options.prewarm"
        yield from ignored_response_tools(self.tools)
        if not isinstance(self.input, str):
            yield from ignored_items(self.input)
        yield from (f"include.{what}" for what in self.include or () if _is_never_there(what))

    def check(self) -> None:
        """Refuses fields that this server cannot honour, and fields that contradict each other.

        Raises:
            ParameterError: the field, by name.
        """
        refuse_unsupported(self)
        check_priority(self.priority)
        check_salt(self.cache_salt)
        for name, harmless in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise ParameterError(f"{name} is not supported yet; leave it out.", param=name)
        for what in self.include or ():
            if what not in (OUTPUT_LOGPROBS, ENCRYPTED_REASONING) and not _is_never_there(what):
                raise ParameterError(
                    f"include can name {OUTPUT_LOGPROBS} and {ENCRYPTED_REASONING}; got {what!r}.", param="include"
                )
        if self.top_logprobs and not self.includes(OUTPUT_LOGPROBS):
            raise ParameterError(f"top_logprobs needs {OUTPUT_LOGPROBS} in include.", param="top_logprobs")
        if self.background and not self.is_stored:
            raise ParameterError("background needs store: there is no other way to get the answer.", param="background")
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise ParameterError("max_tool_calls must be at least 1.", param="max_tool_calls")
        if self.conversation is not None and self.previous_response_id is not None:
            raise ParameterError(
                "conversation does not go with previous_response_id; leave one out.", param="conversation"
            )
        check_metadata(self.metadata)

    def to_chat_input(self, messages: list[dict[str, Any]], tools: OfferedTools) -> ChatInput:
        """The conversation whose answer is the response.

        Args:
            messages: the conversation, as chat templates read it.
            tools: the tools that the request offers.

        Raises:
            ParameterError: a field that is malformed or contradicts another, by its name in chat completions (`NAMES`).
        """
        returns_logprobs = self.includes(OUTPUT_LOGPROBS)
        form = OutputFields(
            response_format=_response_format(self.text.format if self.text else None),
            structured_outputs=self.structured_outputs,
        )
        goes_on = self.ends_unfinished and bool(messages[-1]["content"])
        max_calls = 1 if self.parallel_tool_calls is False else self.max_tool_calls
        return ChatInput(
            names={"logprobs": "top_logprobs", **form.chat_format_names()},
            messages=messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tools=read_tool_set(tools.chat or None, tools.chat_choice(self.tool_choice), max_calls=max_calls),
            template_variables=self.chat_template_kwargs or {},
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=form.response_format,
            include_reasoning=self.include_reasoning is not False,
            sampling={
                **read_sampling(self),
                "logprobs": (self.top_logprobs or 0) if returns_logprobs else None,
                "structured_outputs": form.read_format(),
            },
            max_tokens=self.max_output_tokens,
            call_prefix=CALL_PREFIX,
            request_type="responses",
            streams=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            media=read_overrides(self),
        ).checked()


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises ParameterError when there are too many entries."""
    if len(metadata or ()) > MAX_METADATA:
        raise ParameterError(f"metadata may have {MAX_METADATA} entries.", param="metadata")


def _is_never_there(what: str) -> bool:
    """True for entries of `include` that no response has: results of tools that a server runs, and images."""
    return what == INPUT_IMAGES or what.partition(".")[0].removesuffix("_output").endswith("_call")


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object", "schema": form.schema}
    if form.schema is None:
        raise ParameterError("text.format of type json_schema needs a schema.", param="text.format")
    schema = {"name": form.name or "schema", "schema": form.schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}

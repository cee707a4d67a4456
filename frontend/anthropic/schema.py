"""Bodies of POST /v1/messages and /v1/messages/count_tokens, each field honoured or refused by name.

A request becomes a `ChatInput`, so sampling and tools are handled in one place for all protocols.
"""

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.core.wire.structured_outputs import StructuredOutputsParams
from quire.frontend.anthropic.content import is_open_turn, system_message, to_messages
from quire.frontend.anthropic.errors import UnsupportedThreadError
from quire.frontend.chat.body_fields import read_sampling, refuse_unsupported
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.partly_read import PartlyRead
from quire.frontend.chat.tool_fields import read_tool_set
from quire.frontend.requests.request_fields import check_salt

FORMAT = "output_config.format"
MIN_THINKING_TOKENS = 1024
"""Least `budget_tokens`, as in Anthropic's API."""

NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Fields that all protocols share, and their names in the Messages API."""

CALL_PREFIX = "toolu_"
"""Prefix of the ids of calls."""


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn, as a string or as blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolParam(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function of the client's, or a tool without a schema that a server would run, which is ignored.

    `cache_control` has no effect, because caching is always on and nothing is billed. The prompt describes every
    function, including one with `defer_loading`.
    """

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    defer_loading: bool | None = None

    @property
    def is_run_by_servers(self) -> bool:
        """True for a tool that a server runs, such as web_search_20250305."""
        return self.type not in (None, "custom") and self.input_schema is None


class ToolChoiceParam(Struct, kw_only=True, forbid_unknown_fields=True):
    """The client's choice of tools: any, a named one, none, or the model's choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """The client's choice of reasoning before the answer, and its limit of tokens. Reasoning is never summarized."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema that the text must satisfy."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer: reasoning effort and format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(PartlyRead, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens: the fields of a message that become the prompt."""

    model: str
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None  # without effect: caching is always on
    thread: Any = None  # a conversation that the server stores; refused, and clients go on without

    def ignored_parts(self) -> Iterator[str]:
        """Tools that a server would run, and edits that shorten the conversation: its prompt is always the whole."""
        for index, tool in enumerate(self.tools or ()):
            if tool.is_run_by_servers:
                yield f"tools[{index}].{tool.type}"
        edits = (self.context_management or {}).get("edits")
        for index, edit in enumerate(edits if isinstance(edits, list) else ()):
            if isinstance(edit, dict) and edit.get("keep") != "all":
                yield f"context_management.edits[{index}].{edit.get('type')}"

    def check(self) -> None:
        """Raises UnsupportedThreadError for a conversation that the server would store."""
        if self.thread is not None:
            raise UnsupportedThreadError("This server keeps no threads; send the whole conversation.", param="thread")

    def to_chat_input(self) -> ChatInput:
        """The conversation.

        Raises:
            ParameterError: a field that is malformed or contradicts another, by its name for all protocols (`NAMES`).
        """
        return self._read({})

    def _read(self, sampling: dict[str, Any], **answer: Any) -> ChatInput:
        """The conversation and the options of its answer, as a ChatInput."""
        messages = system_message(self.system)
        for index, message in enumerate(self.messages):
            messages += to_messages(message.role, message.content, index)
        asked = self.tool_choice
        offered = ((index, tool) for index, tool in enumerate(self.tools or ()) if not tool.is_run_by_servers)
        tools = [_chat_tool(tool, index) for index, tool in offered]
        goes_on = is_open_turn(messages)
        form = _output_format(self.output_config)
        held_to = "tools" if form is None else FORMAT  # the field that becomes a grammar
        return ChatInput(
            names={
                **NAMES,
                "structured_outputs": held_to,
                "structured_outputs.json": held_to,
                "structured_outputs.structural_tag": held_to,
            },
            messages=messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tools=read_tool_set(
                tools or None, _chat_choice(asked), max_calls=1 if asked and asked.disable_parallel_tool_use else None
            ),
            template_variables={**_thinks(self.thinking), **(self.chat_template_kwargs or {})},
            reasoning_effort=self.output_config.effort if self.output_config else None,
            response_format=None if form is None else {"type": "json_schema", "json_schema": {"schema": form.json}},
            sampling={**sampling, "logprobs": None, "structured_outputs": form},
            call_prefix=CALL_PREFIX,
            **answer,
        ).checked()


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    timeout: float | None = None  # seconds; see `requests/deadline.py`
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    # Without effect, because they concern Anthropic's billing and capacity.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # As in chat completions.
    watermarking: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None

    def to_chat_input(self) -> ChatInput:
        """The conversation and the options of its answer. Raises ParameterError."""
        refuse_unsupported(self)
        check_salt(self.cache_salt)
        sampling = read_sampling(self)
        if self.stop_sequences is not None:
            sampling["stop"] = self.stop_sequences
        if self.thinking is not None and (budget := _thinking_budget(self.thinking, self.max_tokens)) is not None:
            sampling["thinking_token_budget"] = budget
        return self._read(
            sampling,
            max_tokens=self.max_tokens,
            lowers_max_tokens=True,
            include_reasoning=self.thinking is None or self.thinking.display != "omitted",
            cache_salt=self.cache_salt,
            streams=bool(self.stream),
        )


def _thinks(thinking: Thinking | None) -> dict[str, Any]:
    """Template variables for thinking; adaptive thinking leaves the choice to the model."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    return {"enable_thinking": thinking.type == "enabled"}


def _thinking_budget(thinking: Thinking, max_tokens: int) -> int | None:
    budget = thinking.budget_tokens
    if thinking.type != "enabled":
        if budget is not None:
            raise ParameterError("budget_tokens goes with thinking of type enabled.", param="thinking.budget_tokens")
        return None
    if budget is None or budget < MIN_THINKING_TOKENS or budget >= max_tokens:
        raise ParameterError(
            f"thinking.budget_tokens must be at least {MIN_THINKING_TOKENS} and less than max_tokens ({max_tokens}); "
            f"got {budget}.",
            param="thinking.budget_tokens",
        )
    return budget


def _chat_tool(tool: ToolParam, index: int) -> dict[str, Any]:
    if not tool.name or tool.input_schema is None:
        raise ParameterError(f"tools[{index}] must have a name and an input_schema.", param="tools")
    function: dict[str, Any] = {"name": tool.name, "parameters": {"type": "object", **tool.input_schema}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _chat_choice(choice: ToolChoiceParam | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise ParameterError("tool_choice of type tool needs a name.", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _output_format(config: OutputConfig | None) -> StructuredOutputsParams | None:
    if config is None or config.format is None:
        return None
    if config.format.schema is None:
        raise ParameterError("output_config.format needs a schema.", param=FORMAT)
    return StructuredOutputsParams(json=config.format.schema)

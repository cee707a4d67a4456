"""A rendered request: token ids, sampling parameters, and how its answer is parsed.

Routes that render return it, /inference/v1/generate takes it, and routes that derender parse its output.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.tool_fields import read_tool_set
from quire.frontend.parsing.tools import ToolChoice


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream. The header of ignored fields lists `include_obfuscation`, because nothing is padded here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerateSampling(SamplingParams):
    """Sampling parameters; without max_tokens, the answer may fill the context."""

    max_tokens: int | None = None

    @classmethod
    def of(cls, sampling: SamplingParams) -> "GenerateSampling":
        """The same parameters, as this Struct."""
        return cls(**msgspec.structs.asdict(sampling))


class ReasoningParserKwargs(Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of a reasoning parser besides the prompt's tokens."""

    chat_template_kwargs: dict[str, Any] = {}


class ParseContext(Struct, forbid_unknown_fields=True, kw_only=True):
    """The part of a conversation that decides how its answer is parsed.

    Ids of calls are random here, or the model's own; `history_tool_call_cnt` is for servers that count calls.
    """

    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = "none"
    parallel_tool_calls: bool | None = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    history_tool_call_cnt: Annotated[int, Meta(ge=0)] = 0

    @classmethod
    def of(cls, chat: ChatInput, template_variables: dict[str, Any]) -> "ParseContext":
        """That of a conversation.

        Args:
            template_variables: all that the chat template gets.
        """
        return cls(
            tools=chat.tools.given or None,
            tool_choice=_choice(chat.tools.choice),
            parallel_tool_calls=chat.tools.choice.max_calls != 1,
            include_reasoning=chat.include_reasoning,
            chat_template_kwargs=template_variables,
            history_tool_call_cnt=sum(
                len(calls) for each in chat.messages if isinstance(calls := each.get("tool_calls"), list)
            ),
        )

    @classmethod
    def read(cls, given: dict[str, Any]) -> "ParseContext":
        """Reads the field `parse_context`. Raises ParameterError."""
        if unknown := sorted(set(given) - set(cls.__struct_fields__)):
            raise ParameterError(
                f"parse_context has fields that this server does not know: {', '.join(unknown)}. Render and generate "
                "with servers of one version.",
                param="parse_context",
            )
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ParameterError(f"parse_context: {error}.", param="parse_context") from None

    def as_chat(self, sampling: SamplingParams) -> ChatInput:
        """A conversation without messages, whose answers are read in the same way.

        Raises:
            ParameterError: a tool or the choice among them is wrong.
        """
        try:
            tools = read_tool_set(
                self.tools, self.tool_choice, max_calls=1 if self.parallel_tool_calls is False else None
            )
        except ParameterError as error:
            raise ParameterError(f"parse_context: {error}", param="parse_context") from None
        return ChatInput(
            names={},
            messages=[],
            tools=tools,
            template_variables=self.chat_template_kwargs,
            include_reasoning=self.include_reasoning,
            sampling={"n": sampling.n, "structured_outputs": sampling.structured_outputs},
        )

    @property
    def names_call(self) -> bool:
        """True if the client named the function that is called."""
        return names_call(self.tool_choice)

    @property
    def forces_call(self) -> bool:
        """True if the client insists on a call."""
        return self.names_call or self.tool_choice == "required"


class RenderedRequest(Struct, kw_only=True):
    """A body of /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    prompt_text: str | None = None  # None for a prompt of token ids
    token_offsets: list[tuple[int, int]] | None = None  # characters of the text, with return_token_offsets
    features: None = None
    content_parts: None = None
    sampling_params: GenerateSampling
    model: str
    reasoning_ended: bool | None = None  # whether a constraint holds from the first token; None without reasoning
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"
    parse_context: ParseContext | None = None  # of a conversation
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: None = None
    ec_transfer_params: None = None


def names_call(choice: str | dict[str, Any] | None) -> bool:
    """True if a tool_choice names the function that is called."""
    return isinstance(choice, dict) and choice.get("type") != "allowed_tools"


def _choice(choice: ToolChoice) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode

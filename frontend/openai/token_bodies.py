"""Bodies of /inference/v1/generate, with vLLM's names of fields."""

from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import ParameterError
from quire.frontend.chat.rendered import GenerateSampling, ParseContext, ReasoningParserKwargs, StreamOptions
from quire.frontend.openai.answers import ChatLogprobs, ChatMessage, CompletionUsage
from quire.frontend.outputs import Logprob
from quire.frontend.requests.request_fields import check_priority, check_salt

_REFUSED = {
    "features": "the models here read text alone",
    "content_parts": "the models here read text alone",
    "kv_transfer_params": "keys and values are not transferred between servers",
    "ec_transfer_params": "embeddings are not transferred between servers",
}

OutputMode: TypeAlias = Literal["tokens", "text", "derender"]
"""text: adds the answer's text, and spells tokens out. derender: adds the answer's message instead."""


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: GenerateSampling
    request_id: str | None = None
    model: str | None = None
    timeout: float | None = None  # seconds; see `requests/deadline.py`
    output_mode: OutputMode = "tokens"
    parse_context: dict[str, Any] | None = None  # read with output_mode "derender" alone, so that all modes take it
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # the prompt's
    cache_salt: str | None = None
    priority: int = 0
    prompt_text: str | None = None  # of a rendered request: for its reader, as are the offsets
    token_offsets: list[tuple[int, int]] | None = None
    # Not supported.
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None

    def check(self) -> None:
        """Raises ParameterError for a field that cannot be honoured."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise ParameterError(f"{name} is refused: {reason}; leave it out.", param=name)
        if not self.token_ids:
            raise ParameterError("token_ids must not be empty.", param="token_ids")
        check_priority(self.priority)
        check_salt(self.cache_salt)
        if self.output_mode != "tokens" and not self.sampling_params.detokenize:
            raise ParameterError(
                f"output_mode {self.output_mode!r} needs sampling_params.detokenize; leave out one of the two.",
                param="output_mode",
            )
        if self.output_mode == "derender" and self.stream:
            raise ParameterError(
                "output_mode 'derender' makes whole messages; leave stream out, or stream tokens and send them to "
                "/v1/chat/completions/derender.",
                param="stream",
            )

    def read_context(self) -> ParseContext | None:
        """The context that selects the answer's parsers, with output_mode "derender". Raises ParameterError."""
        if self.output_mode != "derender" or self.parse_context is None:
            return None
        return ParseContext.read(self.parse_context)


class AbortRequest(Struct):
    """Body of POST /inference/v1/abort_requests: ids that answers have, or that requests for tokens chose."""

    request_ids: list[str]


class TokenIdLogprob(Struct):
    """One candidate for a token, by its id."""

    token_id: int
    logprob: float
    rank: int | None


class TokenIdLogprobs(TokenIdLogprob):
    """The sampled token, and the likeliest ones."""

    top_logprobs: list[TokenIdLogprob]


class GenerateLogprobs(Struct):
    """Log-probabilities of a choice with output_mode "tokens", an entry per token."""

    content: list[TokenIdLogprobs]


AnyLogprobs = GenerateLogprobs | ChatLogprobs
L = TypeVar("L")


class GenerateChoice(Struct, Generic[L], kw_only=True):
    """One of the n answers, or in a stream the part that is new. With output_mode "text", its tokens are spelt out."""

    index: int
    token_ids: list[int] | None = None  # None if they would show hidden reasoning
    text: str | UnsetType = UNSET  # with output_mode "text"
    message: ChatMessage | UnsetType = UNSET  # with output_mode "derender"
    logprobs: L | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None


class GenerateChunk(Struct, Generic[L], kw_only=True):
    """One event of a stream."""

    request_id: str
    output_mode: OutputMode
    choices: list[GenerateChoice[L]]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class GenerateResponse(Struct, Generic[L], kw_only=True):
    """Answer of POST /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    output_mode: OutputMode
    choices: list[GenerateChoice[L]]
    usage: CompletionUsage
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None

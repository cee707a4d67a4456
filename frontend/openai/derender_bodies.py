"""Bodies of the routes that derender, with vLLM's names of fields. They contain answers of /inference/v1/generate."""

from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta, Struct

from quire.core.errors import ParameterError
from quire.frontend.openai.answers import PromptTokensDetails
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.outputs import Logprob

TokenId = Annotated[int, Meta(ge=0)]
Length = Annotated[int, Meta(gt=0)]
C = TypeVar("C")


class GivenLogprob(Struct, kw_only=True):
    """One candidate for a token."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class GivenPosition(GivenLogprob, kw_only=True):
    """The sampled token, and the likeliest ones."""

    top_logprobs: list[GivenLogprob] = []

    def row(self) -> dict[int, Logprob]:
        """The log-probabilities by token id, the position's own first."""
        row = {self.token_id: Logprob(self.logprob, self.rank)}
        for each in self.top_logprobs:
            row.setdefault(each.token_id, Logprob(each.logprob, each.rank))
        return row


class GivenLogprobs(Struct, kw_only=True):
    """Log-probabilities of one choice."""

    content: list[GivenPosition] | None = None


class GivenUsage(Struct, kw_only=True):
    """The tokens that a server counted."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """The number of cached prompt tokens; None if the server does not report it."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class GivenPart(Struct, kw_only=True):
    """The new part of one of the n answers."""

    index: int
    token_ids: list[TokenId] | None = None
    logprobs: GivenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def positions(self) -> list[GivenPosition] | None:
        """The log-probabilities, an entry per token."""
        return None if self.logprobs is None else self.logprobs.content or []


class GivenChoice(GivenPart, kw_only=True):
    """One of the n answers, whole."""

    finish_reason: str | None = "stop"


class GivenResponse(Struct, kw_only=True):
    """A whole answer of /inference/v1/generate with output_mode "tokens"."""

    request_id: str = ""
    choices: list[GivenChoice]
    output_mode: Literal["tokens"] = "tokens"
    usage: GivenUsage | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[TokenId] | None = None


class GivenChunk(Struct, kw_only=True):
    """One event of a stream of /inference/v1/generate with output_mode "tokens"."""

    request_id: str = ""
    choices: list[GivenPart]
    output_mode: Literal["tokens"] = "tokens"
    usage: GivenUsage | None = None
    prompt_token_ids: list[TokenId] | None = None


class StreamState(Struct, kw_only=True):
    """State that the client carries from one event of a choice to the next: the tokens so far, and the parts sent."""

    output_token_ids: list[TokenId] = []
    output_chunk_lens: list[Length] = []  # tokens of each event
    role_sent: bool = False
    last_tool_call_ids: list[str] = []
    logprob_text_offset: Annotated[int, Meta(ge=0)] = 0  # characters of the tokens with log-probabilities

    def chunks(self) -> list[list[int]]:
        """The tokens of each event. Raises ParameterError."""
        chunks, start = [], 0
        for length in self.output_chunk_lens:
            chunks.append(self.output_token_ids[start : start + length])
            start += length
        if start != len(self.output_token_ids):
            raise ParameterError(
                f"stream_state.output_chunk_lens are {start} in all, but there are {len(self.output_token_ids)} "
                "output_token_ids; send the state as it was answered.",
                param="stream_state",
            )
        return chunks


class DerenderChatRequest(Struct, kw_only=True):
    """Body of POST /v1/chat/completions/derender. With `stream`, an event and the state before it; else an answer."""

    stream: bool = False
    model: str | None = None
    generate_response: GivenResponse | None = None
    generate_chunk: GivenChunk | None = None
    stream_state: StreamState | None = None  # None before the first event
    prompt_tokens: int | None = None  # for the usage
    prompt_token_ids: list[TokenId] | None = None
    chat_request: ChatRequest | None = None  # the conversation that was rendered


class DerenderCompletionRequest(Struct, kw_only=True):
    """Body of POST /v1/completions/derender. With `stream`, an event and the state before it; else all answers."""

    stream: bool = False
    model: str | None = None
    generate_responses: list[GivenResponse] | None = None  # one for each prompt
    generate_chunk: GivenChunk | None = None
    stream_state: StreamState | None = None
    prompt_tokens: int | list[int] | None = None  # of each prompt; with `stream` of one
    prompt_token_ids: list[TokenId | list[TokenId] | None] | None = None  # as for prompt_tokens
    completion_request: CompletionRequest | None = None  # the request that was rendered


class DerenderedChunk(Struct, Generic[C], kw_only=True):
    """Answer for one event: the chunk of the plain route, and the state for the next event."""

    chunk: C
    stream_state: StreamState

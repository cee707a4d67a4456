"""POST /inference/v1/generate: token ids in, token ids out, for callers with a tokenizer of their own.

The body is what /v1/chat/completions/render and /v1/completions/render answer.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import RANK_HEADER, ClientHeaders
from quire.frontend.chat.renaming import renamed
from quire.frontend.http.event_stream import ACCEPTED, DONE
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import ChatLogprobs, CompletionUsage, PromptTokensDetails
from quire.frontend.openai.generation import event
from quire.frontend.openai.logprobs import LOWEST, LogprobFormatter, prompt_logprobs
from quire.frontend.openai.schema import StreamOptions
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests.ids import engine_id
from quire.frontend.requests.request_fields import check_priority, check_salt
from quire.frontend.requests.request_stream import RequestStream

_REFUSED = {
    "features": "the models here read text alone",
    "content_parts": "the models here read text alone",
    "kv_transfer_params": "keys and values are not transferred between servers",
    "ec_transfer_params": "embeddings are not transferred between servers",
    "reasoning_ended": "a constraint that comes after reasoning is a structural tag here, as /render writes it",
    "reasoning_parser_kwargs": "a constraint that comes after reasoning is a structural tag here, as /render writes it",
}


_PREFIX = "generate-tokens-"


class GenerateSampling(SamplingParams):
    """Sampling parameters; without max_tokens, the answer may fill the context."""

    max_tokens: int | None = None

    @classmethod
    def of(cls, sampling: SamplingParams) -> "GenerateSampling":
        """The same parameters, as this Struct."""
        return cls(**msgspec.structs.asdict(sampling))


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: GenerateSampling
    request_id: str | None = None
    model: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"  # text: with the answer's text, and tokens spelt out
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
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None

    def check(self) -> None:
        """Raises ParameterError for a field that cannot be honoured."""
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise ParameterError(f"{name} is refused: {reason}; leave it out.", param=name)
        if not self.token_ids:
            raise ParameterError("token_ids must not be empty.", param="token_ids")
        check_priority(self.priority)
        check_salt(self.cache_salt)
        if self.output_mode == "text" and not self.sampling_params.detokenize:
            raise ParameterError(
                "output_mode 'text' needs sampling_params.detokenize; leave out one of the two.", param="output_mode"
            )


class AbortRequest(Struct):
    """Body of POST /inference/v1/abort_requests: ids that answers have, or that requests for tokens chose."""

    request_ids: list[str]


class TokenIdLogprob(Struct):
    """One token that might have come, by its id."""

    token_id: int
    logprob: float
    rank: int | None


class TokenIdLogprobs(TokenIdLogprob):
    """The token that came, and the likeliest ones."""

    top_logprobs: list[TokenIdLogprob]


class GenerateLogprobs(Struct):
    """Log-probabilities of a choice with output_mode "tokens", an entry per token."""

    content: list[TokenIdLogprobs]


AnyLogprobs = GenerateLogprobs | ChatLogprobs
L = TypeVar("L")


class GenerateChoice(Struct, Generic[L], kw_only=True):
    """One of the n answers, or in a stream the part that is new. With output_mode "text", its tokens are spelt out."""

    index: int
    token_ids: list[int]
    text: str | UnsetType = UNSET  # with output_mode "text"
    logprobs: L | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None


class GenerateChunk(Struct, Generic[L], kw_only=True):
    """One event of a stream."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[GenerateChoice[L]]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class GenerateResponse(Struct, Generic[L], kw_only=True):
    """Answer of POST /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[GenerateChoice[L]]
    usage: CompletionUsage
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class TokenGeneration:
    """Answers requests of token ids."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig) -> None:
        self._engine = engine
        self._cache_details = server.enable_prompt_tokens_details
        self._encoder = msgspec.json.Encoder()

    async def complete(
        self, request: GenerateRequest, headers: ClientHeaders = ClientHeaders()
    ) -> GenerateResponse[AnyLogprobs]:
        """The whole answer; cancelling aborts it in the engine. Raises RequestError and EngineError."""
        reply_id = _reply_id(request, headers)
        stream = await self._open(request, reply_id, RequestOutputKind.FINAL_ONLY, headers)
        try:
            async for output in stream:
                last = output
        finally:
            stream.close()
        num_generated = sum(len(each.token_ids) for each in last.outputs)
        return GenerateResponse(
            request_id=reply_id,
            model=self._engine.model.name,
            created=int(time.time()),
            output_mode=request.output_mode,
            choices=[self._choice(request, each) for each in last.outputs],
            usage=self._usage(last, num_generated),
            prompt_logprobs=prompt_logprobs(last.prompt_logprobs),
            prompt_token_ids=request.token_ids if request.return_token_ids else None,
        )

    async def stream(
        self, request: GenerateRequest, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The answer as events, one for each part of a choice; closing the generator aborts it in the engine."""
        reply_id = _reply_id(request, headers)
        stream = await self._open(request, reply_id, RequestOutputKind.DELTA, headers)
        options = request.stream_options or StreamOptions()
        counts = [0] * request.sampling_params.n
        told_prompt = not request.return_token_ids
        try:
            yield ACCEPTED
            async for output in stream:
                for each in output.outputs:
                    counts[each.index] += len(each.token_ids)
                    choices = [self._choice(request, each)]
                    chunk = GenerateChunk(request_id=reply_id, output_mode=request.output_mode, choices=choices)
                    if options.include_usage and options.continuous_usage_stats:
                        chunk.usage = self._usage(output, counts[each.index])
                    if not told_prompt:
                        told_prompt, chunk.prompt_token_ids = True, request.token_ids
                    yield event(chunk, self._encoder)
            if options.include_usage:
                usage = self._usage(output, sum(counts))
                mode = request.output_mode
                told = GenerateChunk[AnyLogprobs](request_id=reply_id, output_mode=mode, choices=[], usage=usage)
                yield event(told, self._encoder)
            yield DONE
        finally:
            stream.close()

    def abort(self, request: AbortRequest) -> None:
        """Ends requests; their answers have the finish_reason "abort". Unknown ids are ignored."""
        asked = request.request_ids
        self._engine.abort_replies({*asked, *(_PREFIX + each for each in asked)})

    async def _open(
        self, request: GenerateRequest, reply_id: str, kind: RequestOutputKind, headers: ClientHeaders
    ) -> RequestStream:
        request.check()
        self._engine.model.check_name(request.model)
        asked = request.sampling_params
        max_tokens = self._engine.sampling_input.limit_output(asked.max_tokens)
        wants_text = request.output_mode == "text" or bool(asked.stop)
        decided = {"max_tokens": max_tokens, "output_kind": kind, "detokenize": wants_text}
        sampling = SamplingParams(**{**msgspec.structs.asdict(asked), **decided})
        with renamed(data_parallel_rank=RANK_HEADER):
            return await self._engine.open(
                {"prompt_token_ids": request.token_ids},
                sampling,
                engine_id(reply_id),
                priority=request.priority,
                cache_salt=request.cache_salt,
                fit_context=asked.max_tokens is None,
                data_parallel_rank=headers.data_parallel_rank,
            )

    def _choice(self, request: GenerateRequest, output: CompletionOutput) -> GenerateChoice[AnyLogprobs]:
        wants_text = request.output_mode == "text"
        return GenerateChoice(
            index=output.index,
            token_ids=output.token_ids,
            text=output.text if wants_text else UNSET,
            logprobs=None if output.logprobs is None else self._logprobs(request, output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _logprobs(
        self, request: GenerateRequest, rows: Sequence[dict[int, Logprob]]
    ) -> GenerateLogprobs | ChatLogprobs:
        if request.output_mode == "text":
            num_top = request.sampling_params.logprobs or 0
            return LogprobFormatter(self._engine.tokenizer, num_top, as_ids=False).chat(rows)
        content = []
        for row in rows:
            entries = [TokenIdLogprob(i, max(each.logprob, LOWEST), each.rank) for i, each in row.items()]
            content.append(TokenIdLogprobs(entries[0].token_id, entries[0].logprob, entries[0].rank, entries))
        return GenerateLogprobs(content)

    def _usage(self, output: RequestOutput, num_generated: int) -> CompletionUsage:
        num_prompt = len(output.prompt_token_ids)
        return CompletionUsage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(output.num_cached_tokens or 0) if self._cache_details else None,
        )


def _reply_id(request: GenerateRequest, headers: ClientHeaders) -> str:
    return f"{_PREFIX}{headers.choose_id(request.request_id)}"

"""POST /inference/v1/generate: token ids in, token ids out, for callers with a tokenizer.

The routes that render return such a body.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from quire.core.errors import ParameterError
from quire.core.wire.request_ids import engine_id
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.answer_events import Choice
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.client_headers import RANK_HEADER, ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.chat.rendered import ParseContext, StreamOptions
from quire.frontend.http.event_stream import ACCEPTED, DONE
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import ChatMessage, CompletionUsage, PromptTokensDetails
from quire.frontend.openai.chat_events import read_message
from quire.frontend.openai.generation import event
from quire.frontend.openai.logprobs import LOWEST, LogprobFormatter, prompt_logprobs
from quire.frontend.openai.token_bodies import (
    AbortRequest,
    AnyLogprobs,
    GenerateChoice,
    GenerateChunk,
    GenerateLogprobs,
    GenerateRequest,
    GenerateResponse,
    TokenIdLogprob,
    TokenIdLogprobs,
)
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.submission import Submission

_PREFIX = "generate-tokens-"


class _MessageReading(Struct):
    """The parsers that turn the answers of a request into messages, with output_mode "derender"."""

    context: ParseContext
    chat: ChatInput
    choices: list[Choice] | None  # None: every text is the answer unchanged
    shows_tokens: bool


class TokenGeneration:
    """Answers requests of token ids."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig, conversations: Conversations) -> None:
        self._engine = engine
        self._conversations = conversations
        self._cache_details = server.enable_prompt_tokens_details
        self._role = server.response_role
        self._encoder = msgspec.json.Encoder()

    async def complete(
        self, request: GenerateRequest, headers: ClientHeaders = ClientHeaders()
    ) -> GenerateResponse[AnyLogprobs]:
        """The whole answer; cancelling aborts it in the engine. Raises RequestError and EngineError."""
        request.check()
        reply_id = _reply_id(request, headers)
        reading = await self._message_reading(request)
        stream = await self._open(request, reply_id, RequestOutputKind.FINAL_ONLY, headers, reading)
        try:
            async for output in stream:
                last = output
        finally:
            stream.close()
        num_generated = sum(len(each.token_ids) for each in last.outputs)
        choices = [
            self._choice(request, each) if reading is None else self._message_choice(request, each, reading)
            for each in last.outputs
        ]
        return GenerateResponse(
            request_id=reply_id,
            model=self._engine.model.chosen_name,
            created=int(time.time()),
            output_mode=request.output_mode,
            choices=choices,
            usage=self._usage(last, num_generated),
            prompt_logprobs=prompt_logprobs(last.prompt_logprobs),
            prompt_token_ids=request.token_ids if request.return_token_ids else None,
        )

    async def stream(
        self, request: GenerateRequest, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The answer as events, one for each part of a choice; closing the generator aborts it in the engine."""
        request.check()
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

    # ----------------------------------------------------------------------------------------------------- requests

    async def _open(
        self,
        request: GenerateRequest,
        reply_id: str,
        kind: RequestOutputKind,
        headers: ClientHeaders,
        reading: _MessageReading | None = None,
    ) -> RequestStream:
        self._engine.model.choose(request.model)
        asked = request.sampling_params
        max_tokens = self._engine.sampling_input.limit_output(asked.max_tokens)
        wants_text = request.output_mode != "tokens" or bool(asked.stop)
        decided: dict[str, Any] = {"max_tokens": max_tokens, "output_kind": kind, "detokenize": wants_text}
        if reading is not None:
            decided["shown_special_token_ids"] = self._conversations.shown_special_ids(reading.chat)
        sampling = SamplingParams(**{**msgspec.structs.asdict(asked), **decided})
        sampling, is_whole = self._constrained(request, sampling)
        with renamed(data_parallel_rank=RANK_HEADER):
            stream = await self._engine.open_stream(
                Submission(
                    {"prompt_token_ids": request.token_ids},
                    sampling,
                    engine_id(reply_id),
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    fit_context=asked.max_tokens is None,
                    grammar_is_whole=is_whole,
                    data_parallel_rank=headers.data_parallel_rank,
                ),
            )
        if reading is not None and reading.chat.tools.bounds_calls:
            for index, choice in enumerate(reading.choices or ()):
                stream.watch(index, choice.take)
        return stream

    def _constrained(self, request: GenerateRequest, sampling: SamplingParams) -> tuple[SamplingParams, bool]:
        """The parameters with a constraint that begins where the request says, and whether it is for the whole output.

        A request that says nothing leaves it to the engine.
        """
        asked, told = sampling.structured_outputs, request.reasoning_parser_kwargs
        if asked is None or (request.reasoning_ended is None and told is None):
            return sampling, False
        if not request.reasoning_ended:
            variables = told.chat_template_kwargs if told is not None and request.reasoning_ended is None else None
            asked = self._conversations.after_reasoning(asked, request.token_ids, template_variables=variables)
        return sampling.replace(structured_outputs=asked), True

    async def _message_reading(self, request: GenerateRequest) -> _MessageReading | None:
        if request.output_mode != "derender":
            return None
        context = request.read_context()
        if context is None and self._conversations.parses:
            raise ParameterError(
                "output_mode 'derender' needs the parse_context that /v1/chat/completions/render answers: this server "
                "finds reasoning or calls in answers.",
                param="parse_context",
            )
        context = context or ParseContext()
        chat = context.as_chat(request.sampling_params)
        return _MessageReading(
            context,
            chat,
            await self._conversations.choices(chat, request.token_ids),
            self._conversations.shows_tokens(chat),
        )

    # ------------------------------------------------------------------------------------------------------ answers

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

    def _message_choice(
        self, request: GenerateRequest, output: CompletionOutput, reading: _MessageReading
    ) -> GenerateChoice[AnyLogprobs]:
        message = ChatMessage(role=self._role, content=output.text)
        reason, stop_reason = output.finish_reason, output.stop_reason
        if reading.choices is not None:
            events = reading.choices[output.index].read_whole(output)
            message, finish = read_message(self._role, events, is_forced=reading.context.forces_call)
            reason, stop_reason = finish.reason, finish.stop_reason
            if reason == "tool_calls" and reading.context.names_call:
                reason = "stop"
        rows = output.logprobs if reading.shows_tokens else None
        return GenerateChoice(
            index=output.index,
            token_ids=output.token_ids if reading.shows_tokens else None,
            message=message,
            logprobs=None if rows is None else self._logprobs(request, rows),
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _logprobs(self, request: GenerateRequest, rows: Sequence[dict[int, Logprob]]) -> AnyLogprobs:
        if request.output_mode != "tokens":
            num_top = request.sampling_params.logprobs or 0
            return LogprobFormatter(self._engine.tokenizer, num_top, as_ids=False).chat(rows)
        content = []
        for row in rows:
            entries = [TokenIdLogprob(i, max(each.logprob, LOWEST), each.rank) for i, each in row.items()]
            content.append(TokenIdLogprobs(entries[0].token_id, entries[0].logprob, entries[0].rank, entries))
        return GenerateLogprobs(content)

    def _usage(self, output: RequestOutput, num_generated: int) -> CompletionUsage:
        num_prompt = output.num_prompt_tokens
        return CompletionUsage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(output.num_cached_tokens or 0) if self._cache_details else None,
        )


def _reply_id(request: GenerateRequest, headers: ClientHeaders) -> str:
    return f"{_PREFIX}{headers.choose_id(request.request_id)}"

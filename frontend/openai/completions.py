"""POST /v1/completions: prompts in, their continuations out, whole or as a stream of events."""

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from quire.core.wire.request_ids import engine_id
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import RANK_HEADER, ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.list_limits import check_lists
from quire.frontend.chat.renaming import renamed
from quire.frontend.http.event_stream import ACCEPTED
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.answers import (
    CompletionChoice,
    CompletionLogprobs,
    TextCompletion,
)
from quire.frontend.openai.completion_events import CompletionChunks, prompt_text, text_of
from quire.frontend.openai.generation import INLINE_CHOICES, Replies, Reply
from quire.frontend.openai.logprobs import LogprobFormatter, prompt_logprobs
from quire.frontend.openai.schema import CompletionRequest
from quire.frontend.outputs import Logprob, RequestOutput
from quire.frontend.parsing.events import Usage
from quire.frontend.requests.async_tokenizer import INLINE_CHARACTERS
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.merging import OutputStream, close, merge
from quire.frontend.requests.prompt import Prompt, PromptLike
from quire.frontend.requests.submission import Submission
from quire.frontend.requests.time_slices import in_thread_if_long, in_time_slices
from quire.frontend.text.fill_in_middle import fill_in_middle

DEFAULT_MAX_TOKENS = 16


class TextCompletions:
    """Answers completion requests. It needs no HTTP, so the batch runner uses it too."""

    def __init__(self, engine: AsyncLLM, server: ServerConfig, conversations: Conversations) -> None:
        self._engine = engine
        self._replies = Replies(engine, server, "cmpl")
        self._conversations = conversations
        self._encoder = msgspec.json.Encoder()

    async def complete(self, request: CompletionRequest, headers: ClientHeaders = ClientHeaders()) -> TextCompletion:
        """The whole answer; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        reply = self._replies.begin(request, headers)
        streams = await self._open(request, reply.id, headers.data_parallel_rank)
        last: dict[int, RequestOutput] = {}
        try:
            async with aclosing(merge(streams)) as outputs:
                async for index, output in outputs:
                    last[index] = without_generated(output) if request.is_echo_alone else output
        finally:
            await close(streams)
        answer = functools.partial(self.answer, request, reply, [last[index] for index in sorted(last)])
        return await in_thread_if_long(answer, is_long=len(last) * (request.n or 1) > INLINE_CHOICES)

    async def stream(
        self, request: CompletionRequest, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The answer as events; closing the generator aborts it in the engine. Errors as for `complete`."""
        reply = self._replies.begin(request, headers)
        streams = await self._open(request, reply.id, headers.data_parallel_rank)
        try:
            yield ACCEPTED
            formatter = self.formatter(request)
            chunks = CompletionChunks(request, reply, formatter, self._encoder, self._engine.tokenizer)
            num_unfinished, is_echo_alone = len(streams), request.is_echo_alone
            async with aclosing(merge(streams)) as outputs:
                async for index, output in outputs:
                    frame = chunks.add(index, without_generated(output) if is_echo_alone else output)
                    num_unfinished -= output.finished
                    if not num_unfinished:  # one write for the last text and the end
                        frame += chunks.end()
                    if frame:
                        yield frame
        finally:
            await close(streams)

    # ----------------------------------------------------------------------------------------------------- requests

    async def _open(
        self, request: CompletionRequest, reply_id: str, data_parallel_rank: int | None
    ) -> list[OutputStream]:
        prompts = request.prompts()
        fields = self.sampling_fields(request)
        check_lists(fields, len(prompts) * (request.n or 1))
        sampling = SamplingParams(**fields)
        streams: list[OutputStream] = []
        try:
            async for index, prompt in in_time_slices(enumerate(prompts)):
                request_id = engine_id(reply_id, index)
                streams.append(await self._open_one(prompt, request, sampling, request_id, data_parallel_rank))
        except BaseException:
            await close(streams)
            raise
        return streams

    def sampling_fields(self, request: CompletionRequest) -> dict[str, Any]:
        """SamplingParams keywords: the request's own fields over the checkpoint's defaults, within the server's limits.
        Raises ParameterError."""
        max_tokens: int | None = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        if request.is_echo_alone:
            max_tokens = 1  # the engine samples one token from every prompt
        sampling_input = self._engine.sampling_input
        fields = {
            **sampling_input.defaults,
            **request.sampling_fields(request.logprobs),
            "max_tokens": sampling_input.limit_output(max_tokens),
        }
        if request.scores_echo:
            fields.setdefault("prompt_logprobs", request.logprobs)
        if self._engine.tokenizer is None:
            fields["detokenize"] = False
        return fields

    async def _open_one(
        self,
        prompt: PromptLike,
        request: CompletionRequest,
        sampling: SamplingParams,
        request_id: str,
        data_parallel_rank: int | None,
    ) -> OutputStream:
        special = request.add_special_tokens is not False
        with renamed(beam_width="n", data_parallel_rank=RANK_HEADER, **request.format_names()):
            if request.use_beam_search:
                assert sampling.max_tokens is not None
                return await self._engine.open_beams(
                    Submission(
                        prompt,
                        BeamSearchParams(**request.beam_fields(), max_tokens=sampling.max_tokens),
                        request_id,
                        priority=request.priority or 0,
                        cache_salt=request.cache_salt,
                        add_special_tokens=special,
                        data_parallel_rank=data_parallel_rank,
                    ),
                    returns_logprobs=sampling.logprobs is not None,
                )
            if sampling.thinking_token_budget is not None:
                sampling = sampling.replace(thinking=self._conversations.thinking_marks(self._as_text(prompt)))
            return await self._engine.open_stream(
                Submission(
                    await self._with_suffix(prompt, request),
                    sampling,
                    request_id,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt,
                    add_special_tokens=special,
                    truncation=request.truncation,
                    fit_context=request.max_tokens is None,
                    data_parallel_rank=data_parallel_rank,
                ),
            )

    def _as_text(self, prompt: PromptLike) -> str:
        """The prompt's text as the model reads it; empty for embeddings."""
        if not isinstance(prompt, str | list):
            return ""
        return prompt if isinstance(prompt, str) else text_of(prompt, self._engine.tokenizer)

    async def _with_suffix(self, prompt: PromptLike, request: CompletionRequest) -> PromptLike | Prompt:
        """The prompt itself, or one that asks for the text between it and `suffix`."""
        if not request.suffix or not isinstance(prompt, str | list):
            return prompt
        special = request.add_special_tokens is not False
        tokenizer = self._engine.async_tokenizer
        must_fit = request.truncation is None
        await tokenizer.check_length(request.suffix, "suffix", must_fit=must_fit)
        if isinstance(prompt, str):
            await tokenizer.check_length(prompt, must_fit=must_fit)
        make = functools.partial(
            fill_in_middle, tokenizer.tokenizer, prompt, request.suffix, add_special_tokens=special
        )
        ids = await in_thread_if_long(make, is_long=len(prompt) + len(request.suffix) > INLINE_CHARACTERS)
        return Prompt(prompt if isinstance(prompt, str) else None, ids)

    # ------------------------------------------------------------------------------------------------------ answers

    def formatter(self, request: CompletionRequest) -> LogprobFormatter:
        """The formatter of an answer's log-probabilities."""
        return self._replies.formatter(request, request.logprobs)

    def answer(self, request: CompletionRequest, reply: Reply, outputs: list[RequestOutput]) -> TextCompletion:
        """Joins the outputs of all prompts into one answer."""
        formatter = self.formatter(request)
        choices = []
        for prompt_index, output in enumerate(outputs):
            echoed = prompt_text(output, self._engine.tokenizer) if request.echo else ""
            rows_of_prompt = prompt_logprobs(output.prompt_logprobs)
            for each in output.outputs:
                rows: Sequence[dict[int, Logprob] | None] | None = each.logprobs
                if rows is not None and request.scores_echo:
                    rows = [*(output.prompt_logprobs or []), *rows]
                choices.append(
                    CompletionChoice(
                        index=prompt_index * (request.n or 1) + each.index,
                        text=echoed + each.text,
                        logprobs=None if rows is None else self._logprobs(request, formatter, rows, output, echoed),
                        finish_reason=each.finish_reason,
                        stop_reason=each.stop_reason,
                        token_ids=each.token_ids if request.return_token_ids else None,
                        prompt_logprobs=None if request.prompt_logprobs is None else rows_of_prompt,
                        prompt_token_ids=output.prompt_token_ids if request.return_token_ids else None,
                        weight_versions=request.weight_versions(len(each.token_ids)),
                    )
                )
        counted = Usage(
            sum(output.num_prompt_tokens for output in outputs),
            sum(len(each.token_ids) for output in outputs for each in output.outputs),
            sum(output.num_cached_tokens or 0 for output in outputs),
        )
        return TextCompletion(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=choices,
            system_fingerprint=reply.fingerprint,
            usage=reply.usage(counted),
        )

    @staticmethod
    def _logprobs(
        request: CompletionRequest,
        formatter: LogprobFormatter,
        rows: Sequence[dict[int, Logprob] | None],
        output: RequestOutput,
        echoed: str,
    ) -> CompletionLogprobs:
        if request.scores_echo:
            return formatter.completion(rows, 0, first_id=output.prompt_token_ids[0])
        return formatter.completion(rows, len(echoed))


def without_generated(output: RequestOutput) -> RequestOutput:
    """An answer to max_tokens=0: the prompt and its log-probabilities, without the one sampled token."""
    for each in output.outputs:
        each.text, each.token_ids, each.stop_reason = "", [], None
        each.logprobs = None if each.logprobs is None else []
        each.finish_reason = each.finish_reason and "length"
    return output

"""Takes requests in: reads the prompt, settles the sampling parameters, and hands the request to the engine."""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from msgspec.structs import replace

from quire.core.config.resolved import EngineConfig
from quire.core.engine.client import EngineClient
from quire.core.errors import ParameterError
from quire.core.wire.pooling import Pooling
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.grammar.compiler import GrammarCompiler
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.requests.adapters import Adapters
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.beam_search import BeamSearch, check_beams
from quire.frontend.requests.chunked_vectors import ChunkedVectors
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.pooling_input import PoolingInput
from quire.frontend.requests.pooling_stream import PoolingStream
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.prompt_readers import PromptReaders
from quire.frontend.requests.request_builder import RequestBuilder
from quire.frontend.requests.request_fields import check_params
from quire.frontend.requests.request_log import RequestLog
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.running_requests import RunningRequests
from quire.frontend.requests.sampling_input import SamplingInput
from quire.frontend.requests.submission import BeamSubmission, GivenSubmission, PoolingSubmission, Submission
from quire.frontend.text.tokenizer import Tokenizer

AfterReasoning = Callable[[SamplingParams, str | None, list[int]], SamplingParams]
"""The same parameters, with constraints that begin after the reasoning; of a prompt's text, if known, and token ids."""


AnySubmission = TypeVar("AnySubmission", GivenSubmission, PoolingSubmission, BeamSubmission)


class RequestIntake:
    """The way of a request from a caller's arguments to the engine, which has been started.

    Args:
        config: the engine's resolved options.
        model: names and per-request defaults.
        client: the engine's client.
        tokenizer: None to serve only token ids.
        metrics: counts requests; None counts nothing.
        log: logs requests; None logs nothing.
        adapters: finds those that requests name.
        after_reasoning: None if constraints hold from the first token.
        item_folder: another process's `ItemFolder`; empty: there is none.

    Attributes:
        limit: tokens that prompt and output may have together.
        async_tokenizer: tokenizes texts, long ones outside the event loop.
        sampling_input: the checkpoint's defaults and the server's limits of sampling parameters.
        prompts: reads prompts in all their forms.
        pooling: settles the parameters of requests for vectors.
        running: the requests that the engine works on.
        hearing: reads sounds; None for a model that hears none.
        media: reads prompts with images; None where the model has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        metrics: Metrics | None,
        log: RequestLog | None,
        adapters: Adapters,
        after_reasoning: AfterReasoning | None,
        item_folder: str = "",
    ) -> None:
        self._spec = config.spec
        self._pooling_spec = config.pooling
        self._client = client
        self._engines = config.served_engines
        self._tokenizer = tokenizer
        self._log = log
        self._adapters = adapters
        self._after_reasoning = after_reasoning
        self.limit = ContextLimit(config.max_model_len, generates=config.pooling is None)
        lower_case = config.pooling is not None and config.pooling.do_lower_case
        self.async_tokenizer = AsyncTokenizer(tokenizer, self.limit, lower_case=lower_case)
        self.pooling = PoolingInput(config.pooling, model.name, is_encoder=config.spec.is_encoder)
        vocab_size = config.spec.vocab_size
        self.sampling_input = SamplingInput(model, tokenizer, vocab_size=vocab_size)
        self._readers = PromptReaders.of(
            config, model, self.async_tokenizer, self.limit, lambda: client.ready[0].reads, metrics, item_folder
        )
        self.prompts, self.media, self.hearing = self._readers
        self.running = RunningRequests(
            client,
            RequestBuilder(self.sampling_input, self.limit, seed=config.seed),
            GrammarCompiler(
                tokenizer,
                vocab_size=vocab_size,
                end_token_ids=config.spec.eos_token_ids,
                options=model.structured_outputs,
            ),
            model,
            tokenizer,
            takes_priority=config.limits.policy == "priority",
            metrics=metrics,
        )

    def close(self) -> None:
        """Ends the threads and processes that read prompts."""
        self.async_tokenizer.close()
        self._readers.close()

    async def open_stream(self, submission: GivenSubmission) -> RequestStream:
        """Validates a request and submits it to the engine. Errors of the request are raised here, before any output.

        Returns:
            The stream of outputs. Close a stream that is not read to its end: that aborts the request.

        Raises:
            ParameterError: a parameter or the prompt is wrong, by name.
            OverloadedError: the caller's key has used its tokens of this minute.
            EngineError: the engine cannot take requests.
        """
        submission.check()
        self.pooling.check_generates()
        submission = submission.with_adapter(await self._adapters.resolve(submission.adapter))
        sampling = self.sampling_input.default_params()
        if submission.params is not None:
            sampling = check_params(submission.params, SamplingParams)
        read = await self._read(submission, sampling.max_tokens)
        submission = self._with_default(submission, read).invoked_by(read.token_ids)
        if self._after_reasoning is not None and not submission.grammar_is_whole:
            sampling = self._after_reasoning(sampling, read.text, read.token_ids)
        await _admit(submission, read)
        engine = self._engine(submission.data_parallel_rank)
        return await self.running.open_stream(submission.resolved(read, sampling), engine=engine, log=self._log)

    async def open_vectors(self, submission: PoolingSubmission) -> PoolingStream | ChunkedVectors:
        """Validates a request for vectors, classes or a score, and submits it to the engine.

        Returns:
            The stream with its output. Close a stream that is not read to its end: that aborts the request.

        Raises:
            ParameterError: a parameter or the prompt is wrong, by name, or the model does not serve the task.
            EngineError: the engine cannot take requests.
        """
        submission.check()
        submission = submission.with_adapter(await self._adapters.resolve(submission.adapter))
        if submission.soft_prompt is not None:
            raise ParameterError(
                "Soft prompts are served for outputs of tokens; leave the adapter out for vectors.", param="model"
            )
        params = PoolingParams() if submission.params is None else check_params(submission.params, PoolingParams)
        pooling = self.pooling.resolve(params)
        longest = self.pooling.longest_prompt(pooling, self.limit)
        read = await self._read(submission, None, must_fit=longest == self.limit.longest_prompt)
        submission = self._with_default(submission, read).invoked_by(read.token_ids)
        if read.media:  # a part of a long prompt would lack its items
            longest = min(longest or self.limit.longest_prompt, self.limit.longest_prompt)
        if longest is not None and len(read.token_ids) > longest:
            raise self.limit.too_long(len(read.token_ids), longest)
        fills_to = 0 if self._pooling_spec is None else self._pooling_spec.fills_to
        if fills_to and not read.media:
            read = read._replace(token_ids=self.async_tokenizer.padded(read.token_ids, fills_to))
        pooling = pooling.without_lead(read.num_lead_tokens)
        await _admit(submission, read)
        engine = self._engine(submission.data_parallel_rank)
        resolved = cast("Submission[Prompt, PoolingParams]", replace(submission, prompt=read, params=params))
        if len(read.token_ids) > self.limit.longest_prompt:
            length = self.limit.longest_prompt
            return await self.running.open_long_vectors(resolved, pooling, length, engine=engine, log=self._log)
        return await self.running.open_vectors(resolved, pooling, engine=engine, log=self._log)

    async def open_alignment(self, submission: PoolingSubmission, pooling: Pooling) -> PoolingStream:
        """Submits tokens of a decoder whose alignment with the encoder's input is wanted, as `pooling` says.

        Errors are those of `open_vectors`.
        """
        submission = submission.with_adapter(await self._adapters.resolve(submission.adapter))
        read = await self._read(submission, None, must_fit=False)
        await _admit(submission, read)
        engine = self._engine(submission.data_parallel_rank)
        resolved = cast("Submission[Prompt, PoolingParams]", replace(submission, prompt=read, params=PoolingParams()))
        return await self.running.open_vectors(resolved, pooling, engine=engine, log=self._log)

    async def _read(
        self, submission: GivenSubmission | PoolingSubmission, max_tokens: int | None, *, must_fit: bool = True
    ) -> Prompt:
        """Reads the prompt, and cuts it if the submission says so; others may be too long only without `must_fit`."""
        special, truncation = submission.add_special_tokens, submission.truncation
        must_fit = must_fit and truncation is None
        read = await self.prompts.read(submission.prompt, add_special_tokens=special, must_fit=must_fit)
        if truncation is None:
            return read
        return self.prompts.truncate(
            read, truncation, max_tokens, has_special_tokens=special, num_before=submission.num_before
        )

    def _with_default(self, submission: AnySubmission, prompt: Prompt) -> AnySubmission:
        """The submission with the adapter of its prompt's images or sounds, if it names none."""
        if not prompt.media or submission.adapter is not None or submission.soft_prompt is not None:
            return submission
        found = self._adapters.default_for({item.modality for item in prompt.media})
        return submission if found is None else submission.with_adapter(found)

    def _engine(self, rank: int | None) -> int | None:
        """The index of the engine of a data-parallel rank among this frontend's engines; None for None."""
        if rank is None:
            return None
        if rank not in self._engines:
            first, last = self._engines[0], self._engines[-1]
            raise ParameterError(
                f"data_parallel_rank is {rank}, but the engines here have the ranks {first} to {last}.",
                param="data_parallel_rank",
            )
        return self._engines.index(rank)

    async def open_beams(self, submission: BeamSubmission, *, returns_logprobs: bool = True) -> BeamSearch:
        """Prepares a beam search from a prompt, and validates it; nothing runs yet.

        Args:
            returns_logprobs: the output includes the log-probabilities of its tokens.

        Raises:
            ParameterError: the rank or the prompt is wrong, the prompt too long for max_tokens, or the model reads
                prompts otherwise than outputs.
        """
        self.pooling.check_generates()
        if self._client.ready[0].whole_prompts:
            raise ParameterError(
                "Beam search submits outputs as parts of prompts, and this model reads prompts in both directions but "
                "outputs in one, so it would find other outputs; leave use_beam_search out.",
                param="use_beam_search",
            )
        submission.check()
        submission = submission.with_adapter(await self._adapters.resolve(submission.adapter))
        params, request_id = check_params(submission.params, BeamSearchParams), submission.request_id
        read = await self.prompts.read(submission.prompt, add_special_tokens=submission.add_special_tokens)
        check_beams(read, params, self.limit.max_model_len, submission.num_before)
        submission = self._with_default(submission, read).invoked_by(read.token_ids)
        await _admit(submission, read)
        if self._log is not None:
            self._log.add(request_id, read, params)
        engine = self._engine(submission.data_parallel_rank)

        def open_request(prompt: Prompt, sampling: SamplingParams, name: str) -> Awaitable[RequestStream]:
            each = submission.resolved(prompt, sampling, name)
            return self.running.open_stream(each, limit_logprobs=False, heeds_rules=False, engine=engine)

        return BeamSearch(
            open_request,
            self._tokenizer,
            self._spec,
            read,
            params,
            request_id,
            lora_request=submission.lora_request,
            returns_logprobs=returns_logprobs,
            rules=self.sampling_input.decoder,
        )


async def _admit(submission: GivenSubmission | PoolingSubmission | BeamSubmission, prompt: Prompt) -> None:
    """Counts a prompt's tokens for the caller's key. Raises OverloadedError past the key's limit."""
    if submission.caller is not None:
        await submission.caller.admit_tokens(len(prompt.token_ids))

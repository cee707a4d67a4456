"""The asynchronous Python API: takes prompts, and returns streams of outputs. The HTTP server and `LLM` use it.

`control/engine_control.py` has the methods on the engine alone.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from quire.core import envs
from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig, ModelSpec
from quire.core.engine.borrowed_engine import BorrowingLauncher, FollowsOwner
from quire.core.engine.client import EngineClient, OnPlaced
from quire.core.errors import ConfigError
from quire.core.logging import configure_for_program
from quire.core.wire.pooling import Pooling
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.protocol import EngineReady
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.checkpoint.adapters import LoRARequest, read_modules
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.control.engine_control import EngineControl
from quire.frontend.control.vllm_config import ModelConfig, VllmConfig, vllm_config
from quire.frontend.launch.engine_options import EngineOptions
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.launch.setup import EngineSetup
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.frontend.refusals.arguments import refuse
from quire.frontend.refusals.methods import explain
from quire.frontend.requests.adapter_resolvers import Hub, LoRAResolver, resolvers_of
from quire.frontend.requests.adapters import Adapters
from quire.frontend.requests.beam_search import BeamSearch
from quire.frontend.requests.chunked_vectors import ChunkedVectors
from quire.frontend.requests.pooling_stream import PoolingStream
from quire.frontend.requests.prompt import PromptLike, with_text
from quire.frontend.requests.prompt_reader import embeds_reader
from quire.frontend.requests.request_intake import AfterReasoning, RequestIntake
from quire.frontend.requests.request_log import RequestLog
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.scored_pairs import PairWriter
from quire.frontend.requests.soft_prompts import SoftPrompts
from quire.frontend.requests.submission import BeamSubmission, GivenSubmission, PoolingSubmission, Submission
from quire.frontend.text.chat_templates import ChatTemplates
from quire.frontend.text.tokenizer import Tokenizer


def _joins_messages(spec: ModelSpec) -> bool:
    """True if an image is no part of a text, so that conversations need no template."""
    return spec.embeds_images or (spec.encoder is not None and spec.encoder.reads_images)


class AsyncLLM(EngineControl):
    """One model and its engine. To be used from one event loop. The engine starts with the first use, or with `start`.

    Args:
        config: the engine's resolved options.
        model: names and per-request defaults.
        client: the engine's client.
        tokenizer: None to serve only token ids.
        metrics: counts requests; None counts nothing.
        log: logs requests; None logs nothing.
        adapters: finds and loads adapters; None: one that serves none from the start.
        item_folder: see `RequestIntake`.

    Attributes:
        limit: tokens that prompt and output may have together.
        async_tokenizer: makes token ids of texts beside the event loop.
        chat_templates: write the prompts of conversations.
        sampling_input: the checkpoint's defaults and the server's limits of sampling parameters.
        prompts: reads prompts in all their forms.
        hearing: reads sounds; None for a model that hears none.
        media: reads prompts with images; None where the model reads text alone.
        adapters: those that requests may use.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        metrics: Metrics | None = None,
        log: RequestLog | None = None,
        adapters: Adapters | None = None,
        item_folder: str = "",
    ) -> None:
        self.adapters = adapters or Adapters(model, client)
        self._intake = RequestIntake(
            *(config, model, client, tokenizer, metrics, log, self.adapters),
            _after_reasoning(model, tokenizer),
            item_folder,
        )
        self._modules: asyncio.Task[None] | None = None  # the load of those that the options name
        super().__init__(config, client, self._intake.limit, metrics)
        self.model = model
        self.async_tokenizer = self._intake.async_tokenizer
        self.sampling_input = self._intake.sampling_input
        self.prompts = self._intake.prompts
        self.hearing = self._intake.hearing
        self.media = self._intake.media
        self.chat_templates = ChatTemplates(tokenizer, model.name, joins=_joins_messages(config.spec))
        self._tokenizer = tokenizer

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs | EngineOptions | None = None,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: Iterable[object] | None = None,
        *,
        usage: Literal["llm", "server"] = "server",
        max_log_len: int | None = None,
        log_outputs: bool = False,
        log_deltas: bool = False,
        **options: Any,
    ) -> "AsyncLLM":
        """Finds the checkpoint, resolves every option and prepares an engine, which starts with the first use.

        Args:
            engine_args: engine options. They may be keywords instead: `model="...", max_num_seqs=64`.
            start_engine_loop: either value means the same, because the first use starts the engine.
            usage_context: a label of vLLM's telemetry, which Quire does not have.
            usage: sets defaults that differ between offline and online use.
            max_log_len, log_outputs, log_deltas: what the log shows of requests with `enable_log_requests`; see
                `RequestLog`.

        Raises:
            ConfigError: an option or the checkpoint is wrong.
        """
        refuse(stat_loggers=stat_loggers)
        if engine_args is not None and options:
            raise ConfigError("Give engine options either as EngineArgs or as keywords, not both.")
        if isinstance(engine_args, EngineOptions):
            engine_args = engine_args.grouped()
        engine_args = engine_args or read_keywords(options)
        configure_for_program(usage, engine_args.observability.logging)
        return cls.from_setup(
            EngineSetup.from_args(engine_args, usage),
            max_log_len=max_log_len,
            log_outputs=log_outputs,
            log_deltas=log_deltas,
        )

    @classmethod
    def from_setup(
        cls,
        setup: EngineSetup,
        *,
        borrowed: Sequence[BorrowingLauncher] | None = None,
        known: Sequence[EngineReady] = (),
        on_placed: OnPlaced | None = None,
        item_folder: str = "",
        max_log_len: int | None = None,
        log_outputs: bool = False,
        log_deltas: bool = False,
    ) -> "AsyncLLM":
        """Like `from_engine_args`, with resolved options and an engine that may have been launched already.

        Args:
            borrowed: engines that another process launches, keeps and counts; None for those of `setup`.
            known: what these can do, if they ran before; see `EngineClient`.
            on_placed: tells other processes which prompts go to which engine; see `EngineClient`.
            item_folder: see `RequestIntake`.

        Raises:
            ConfigError: the tokenizer or the checkpoint's sampling defaults are wrong.
        """
        args, config = setup.args, setup.config
        tokenizer = None
        if not args.model.skip_tokenizer_init:
            tokenizer = Tokenizer.from_folder(
                setup.tokenizer_folder, args.model.tokenizer_mode, args.model.trust_remote_code
            )
        model = ServedModel.from_args(args, setup.folder)
        metrics = None
        if config.log_stats:
            metrics = Metrics(
                model.name,
                config.max_model_len,
                config.served_engines,
                counts_engines=borrowed is None,
                max_adapters=config.limits.max_adapters,
            )
        client = EngineClient(
            setup.launchers if borrowed is None else borrowed,
            num_slots=config.limits.max_num_seqs,
            on_stats=metrics.on_stats if metrics else None,
            restarts=setup.restarts if borrowed is None else FollowsOwner,
            known=known,
            coupled=config.layout.shares_experts,
            on_placed=on_placed,
            on_pause=metrics.on_pause if metrics else None,
            on_replay=metrics.on_replay if metrics else None,
        )
        for number, statistics in enumerate(metrics.engines if metrics else []):
            statistics.status = partial(client.status_of, number)
        log = None
        if args.observability.enable_log_requests:
            log = RequestLog(max_length=max_log_len, outputs=log_outputs, deltas=log_deltas)
        adapters = Adapters(
            model,
            client,
            read_modules(args.lora),
            _resolvers(args, model),
            _soft_prompts(args, config),
            _media_adapters(args, config),
        )
        return cls(config, model, client, tokenizer, metrics, log, adapters, item_folder)

    # ----------------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> EngineReady:
        """Starts the engine, and loads the adapters that the options name; later calls return at once.

        Raises:
            ConfigError: the checkpoint or an adapter cannot be used.
            EngineDeadError: the engine cannot start.
        """
        ready = await super().start()
        if self._modules is None:
            self._modules = asyncio.create_task(self.adapters.load_modules())
        if not self._modules.done():
            await asyncio.shield(self._modules)
        else:
            self._modules.result()
        return ready

    async def aclose(self) -> None:
        """Ends running requests with finish_reason "abort", then the engine, in order."""
        self._intake.running.close()
        self._intake.close()
        await super().aclose()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine by force, without regard to the timeout, and returns when its memory is free. For use outside
        an event loop."""
        self._intake.close()
        super().shutdown(timeout)

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # ----------------------------------------------------------------------------------------------------- requests

    async def open_stream(self, submission: GivenSubmission) -> RequestStream:
        """Validates a request and submits it to the engine; result and errors are `RequestIntake.open_stream`'s."""
        await self.start()
        return await self._intake.open_stream(submission)

    async def open_beams(self, submission: BeamSubmission, *, returns_logprobs: bool = True) -> BeamSearch:
        """Prepares a beam search from a prompt; arguments, result and errors are `RequestIntake.open_beams`'s."""
        await self.start()
        return await self._intake.open_beams(submission, returns_logprobs=returns_logprobs)

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: object = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs of one request as they arrive. Other arguments, and errors, are those of `open_stream`.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args:
            prompt_text: the text that outputs show for a prompt of token ids.
            tokenization_kwargs: see `Tokenization.read`.
        """
        refuse(
            trace_headers=trace_headers,
            session_id=session_id,
            kv_hints=kv_hints,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        submission = Submission.of_call(
            with_text(prompt, prompt_text),
            sampling_params,
            request_id,
            tokenization_kwargs,
            priority=priority,
            cache_salt=cache_salt,
            data_parallel_rank=data_parallel_rank,
            adapter=lora_request,
        )
        stream = await self.open_stream(submission)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def open_vectors(self, submission: PoolingSubmission) -> PoolingStream | ChunkedVectors:
        """Validates a request for vectors and submits it to the engine; result and errors are
        `RequestIntake.open_vectors`'s."""
        await self.start()
        return await self._intake.open_vectors(submission)

    async def open_alignment(self, submission: PoolingSubmission, pooling: Pooling) -> PoolingStream:
        """Submits tokens whose alignment is wanted; result and errors are `RequestIntake.open_alignment`'s."""
        await self.start()
        return await self._intake.open_alignment(submission, pooling)

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
        *,
        data_parallel_rank: int | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yields the one output of a request for vectors, classes or a score. Errors are those of `open_vectors`.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args:
            prompt: a text, or token ids. Pairs of texts go to `LLM.score`, or to the routes of scores.
            pooling_params: None for the model's defaults; its `task` is one of `get_supported_tasks`.
            tokenization_kwargs: see `Tokenization.read`.
        """
        refuse(trace_headers=trace_headers, reasoning_ended=reasoning_ended)
        submission = Submission.of_call(
            prompt,
            pooling_params,
            request_id,
            tokenization_kwargs,
            priority=priority,
            cache_salt=cache_salt,
            data_parallel_rank=data_parallel_rank,
            adapter=lora_request,
        )
        stream = await self.open_vectors(submission)
        try:
            yield await stream.output()
        finally:
            stream.close()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter, so that it is there when a request comes. Returns True.

        Raises:
            NotFoundError: there is no adapter.
            ParameterError: it does not fit the model, or the engine takes none.
        """
        await self.start()
        await self.adapters.bring(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forgets the adapters that requests brought with this `lora_int_id`. Returns True if there was one."""
        return self.adapters.forget(lora_id)

    async def list_loras(self) -> set[int]:
        """The `lora_int_id` of the adapters that requests brought."""
        return self.adapters.brought

    async def reset_mm_cache(self) -> None:
        """Forgets the processed images, videos and sounds that are kept for later prompts."""
        if self.media is not None:
            self.media.reader.forget()

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests. Their streams end with an output with finish_reason "abort". Unknown ids are ignored.

        Args:
            internal: an id is the same inside the engine and outside, so either value means the same.
        """
        self._intake.running.abort([request_id] if isinstance(request_id, str) else request_id)

    def abort_replies(self, reply_ids: Collection[str]) -> None:
        """As `abort`, for the ids that answers have, of this server and of others with the same engine."""
        self._intake.running.abort_replies(reply_ids)

    @property
    def num_unfinished(self) -> int:
        """Number of running requests."""
        return len(self._intake.running)

    def get_num_unfinished_requests(self) -> int:
        """The same as `num_unfinished`."""
        return self.num_unfinished

    # -------------------------------------------------------------------------------------------------------- facts

    def check_generates(self) -> None:
        """Raises ParameterError if the model makes vectors, classes or scores instead of text."""
        self._intake.pooling.check_generates()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model can do, by vLLM's names."""
        return self.supported_tasks

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The same as `get_supported_tasks`, at once; the usual one first."""
        return self._intake.pooling.tasks

    def pair_writer(self, template: str | None = None) -> PairWriter:
        """A writer of pairs, for models that read two texts at once; arguments and errors are those of `PairWriter`."""
        return PairWriter(
            self.async_tokenizer,
            self.chat_templates,
            self.config.pooling,
            template=template,
            limit=self.limit,
            num_token_types=self.config.spec.num_token_types,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with `--skip-tokenizer-init`."""
        return self._tokenizer

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as Transformers' own class."""
        from transformers import AutoTokenizer  # imported here: it takes 5 s, and nothing else needs it

        tokenizer = self.async_tokenizer.tokenizer
        return AutoTokenizer.from_pretrained(str(tokenizer.folder), trust_remote_code=tokenizer.trust_remote_code)

    @property
    def vllm_config(self) -> VllmConfig:
        """The options that run, by vLLM's names; final when the engine has started."""
        tokenizer = self.tokenizer
        return vllm_config(
            self.config,
            self.model,
            self.ready,
            max_model_len=self.max_model_len,
            tokenizer=None if tokenizer is None else str(tokenizer.folder),
        )

    @property
    def model_config(self) -> ModelConfig:
        """Those of the model."""
        return self.vllm_config.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's defaults for sampling parameters."""
        return self.sampling_input.default_params()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain(type(self), name))


def _after_reasoning(model: ServedModel, tokenizer: Tokenizer | None) -> AfterReasoning | None:
    """Builds the object that lets constraints begin after the reasoning; None if the options name no parser.

    Raises:
        ConfigError: there is no parser of that name, or a plugin cannot be loaded.
    """
    if model.reasoning.parser_name is None or tokenizer is None or model.structured_outputs.enable_in_reasoning:
        return None
    # Imported here, because most engines have no parser.
    from quire.frontend.parsing.answers.constraints import ConstraintsAfterReasoning

    return ConstraintsAfterReasoning.from_options(model.reasoning, tokenizer).apply


def _resolvers(args: EngineArgs, model: ServedModel) -> Sequence[LoRAResolver]:
    """Those that look for adapters that requests name; none without QUIRE_ALLOW_RUNTIME_LORA_UPDATING."""
    if not envs.read_flag("ALLOW_RUNTIME_LORA_UPDATING"):
        return ()
    return resolvers_of(_names_of(args, model), Hub(args.model.hf_token, args.load.download_dir))


def _media_adapters(args: EngineArgs, config: EngineConfig) -> dict[str, str]:
    """The folders of `--default-mm-loras`. Raises ConfigError if the model reads no media."""
    paths = args.lora.media_paths()
    if paths and not config.reads_media:
        raise ConfigError(f"--default-mm-loras: {config.spec.name} reads text alone; leave it out.")
    return paths


def _soft_prompts(args: EngineArgs, config: EngineConfig) -> SoftPrompts | None:
    """Reads soft prompts; None without --enable-prompt-adapter."""
    if not args.lora.enable_prompt_adapter:
        return None
    longest = args.lora.max_prompt_adapter_token or config.max_model_len
    return SoftPrompts(embeds_reader(config.spec.hidden_size), longest)


def _names_of(args: EngineArgs, model: ServedModel) -> list[str]:
    """The names by which adapters may know the served model."""
    given = [] if args.model.model is None else [args.model.model]
    return [*given, *model.names, model.folder]

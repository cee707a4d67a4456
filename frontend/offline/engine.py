"""`LLMEngine`: an engine for programs without an event loop, which may drive it output by output."""

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ParameterError
from quire.core.wire.pooling_params import PoolingParams
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.launch.engine_options import EngineOptions
from quire.frontend.launch.event_loop import EventLoopThread
from quire.frontend.metrics.reader import Metric
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.frontend.refusals.arguments import refuse
from quire.frontend.refusals.methods import explain
from quire.frontend.requests.chunked_vectors import ChunkedVectors
from quire.frontend.requests.pooling_stream import PoolingStream
from quire.frontend.requests.prompt import PromptLike, with_text
from quire.frontend.requests.request_fields import check_id
from quire.frontend.requests.request_stream import RequestStream
from quire.frontend.requests.submission import GivenSubmission, PoolingSubmission, Submission
from quire.frontend.requests.tokenization import Tokenization
from quire.frontend.text.tokenizer import Tokenizer

T = TypeVar("T")

EngineOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
_News = queue.SimpleQueue[tuple[str, EngineOutput | Exception]]
"""(request id, its next output, or the error that ended it)"""


class LLMEngine:
    """An engine in a separate process, and the thread whose event loop talks to it.

        engine = LLMEngine.from_engine_args(EngineArgs(model="Qwen/Qwen3-0.6B"))
        engine.add_request("0", "The capital of France is", SamplingParams(max_tokens=8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    The engine works on requests as soon as they are added; `step` waits for its next outputs. `shutdown` ends the
    engine; so does the end of the interpreter, and of this object.

    Args:
        async_llm: what the thread runs; not yet started.

    Attributes:
        vllm_config: the options that run, by vLLM's names; `config` has Quire's.
        model_config: those of the model.

    Raises:
        ConfigError: the engine cannot start with these options or this checkpoint.
    """

    def __init__(self, async_llm: AsyncLLM) -> None:
        self.async_llm = async_llm
        self._news: _News = queue.SimpleQueue()
        self._readers: dict[str, asyncio.Task[None]] = {}  # of unfinished requests
        self._untold: deque[Exception] = deque()
        self._thread = EventLoopThread("quire-llm")
        # The finalizer must not refer to self, or self would never be collected. It runs at interpreter exit, too.
        self._end = weakref.finalize(self, _end, self._thread, async_llm)
        try:
            self.run(async_llm.start())
        except BaseException:
            self._end()
            raise
        self.vllm_config = async_llm.vllm_config
        self.model_config = self.vllm_config.model_config

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs | EngineOptions,
        usage_context: object = None,
        stat_loggers: Iterable[object] | None = None,
        enable_multiprocessing: bool = True,
    ) -> "LLMEngine":
        """Starts an engine with these options.

        Args:
            usage_context: a label of vLLM's telemetry, which Quire does not have.
            enable_multiprocessing: the engine runs in a process of its own either way.
        """
        refuse(stat_loggers=stat_loggers)
        return cls(AsyncLLM.from_engine_args(engine_args, usage="llm"))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the event loop's thread, and returns its result. Ctrl-C cancels it."""
        return self._thread.run(work)

    def shutdown(self) -> None:
        """Ends the engine. Idempotent."""
        self._end()

    # ------------------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: object = None,
    ) -> str:
        """Hands a request to the engine, and returns its id.

        Args:
            request_id: unique among unfinished requests.
            params: `output_kind` says whether outputs are whole, parts, or the last one alone. PoolingParams ask for
                vectors.
            tokenization_kwargs: see `Tokenization.read`.
            lora_request: the request's adapter; needs `enable_lora=True`.
            priority: lower runs first, with `scheduling_policy="priority"`.
            prompt_text: the text that outputs show for a prompt of token ids.

        Raises:
            ParameterError: the prompt or a parameter is wrong, by name.
        """
        refuse(trace_headers=trace_headers, session_id=session_id, kv_hints=kv_hints)
        check_id(request_id)
        if request_id in self._readers:
            raise ParameterError(f"request_id {request_id!r} is in use by an unfinished request.", param="request_id")
        tokenization = Tokenization.read(tokenization_kwargs)
        text = with_text(prompt, prompt_text)
        self.run(self._add(request_id, text, params, arrival_time, lora_request, tokenization, priority))
        return request_id

    async def _add(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None,
        adapter: LoRARequest | None,
        tokenization: Tokenization,
        priority: int,
    ) -> None:
        submission: Submission[PromptLike, SamplingParams | PoolingParams] = Submission(
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=tokenization.add_special_tokens,
            truncation=tokenization.truncation,
            arrival_time=arrival_time,
            adapter=adapter,
        )
        stream: RequestStream | PoolingStream | ChunkedVectors
        if isinstance(params, PoolingParams):
            stream = await self.async_llm.open_vectors(cast("PoolingSubmission", submission))
        else:
            stream = await self.async_llm.open_stream(cast("GivenSubmission", submission))
        self._readers[request_id] = asyncio.create_task(_read(stream, self._news))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter; see `AsyncLLM.add_lora`."""
        return self.run(self.async_llm.add_lora(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter; see `AsyncLLM.remove_lora`."""
        return self.run(self.async_llm.remove_lora(lora_id))

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that requests brought."""
        return self.run(self.async_llm.list_loras())

    def step(self) -> list[EngineOutput]:
        """The outputs that have come since the last call; waits for one. Without unfinished requests, none.

        Raises:
            QuireError: the engine refused a request, or failed at it; the request has ended.
        """
        if self._untold:
            raise self._untold.popleft()
        outputs: list[EngineOutput] = []
        while self._readers and not outputs and not self._untold:
            self._take(self._news.get(), outputs)
            while not self._news.empty():
                self._take(self._news.get(), outputs)
        if self._untold and not outputs:
            raise self._untold.popleft()
        return outputs

    def _take(self, news: tuple[str, EngineOutput | Exception], outputs: list[EngineOutput]) -> None:
        request_id, what = news
        if request_id not in self._readers:  # aborted meanwhile
            return
        if isinstance(what, Exception) or what.finished:
            del self._readers[request_id]
        if isinstance(what, Exception):
            self._untold.append(what)
        else:
            outputs.append(what)

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests, which have no more outputs. Unknown ids are ignored.

        Args:
            internal: an id is the same inside the engine and outside, so either value means the same.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        readers = [self._readers.pop(request_id) for request_id in ids if request_id in self._readers]
        self.run(_cancel(readers))

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output `step` has not returned."""
        return len(self._readers)

    def has_unfinished_requests(self) -> bool:
        """True if `step` has more to return, or an error to raise."""
        return bool(self._readers or self._untold)

    # ---------------------------------------------------------------------------------------------------------- facts

    @property
    def config(self) -> EngineConfig:
        """The engine's resolved options."""
        return self.async_llm.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer as Quire's own class; None with `skip_tokenizer_init`."""
        return self.async_llm.tokenizer

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as Transformers' own class."""
        return self.async_llm.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model can do, by vLLM's names."""
        return self.async_llm.supported_tasks

    def get_metrics(self) -> list[Metric]:
        """The metrics at this moment. Raises ConfigError with `disable_log_stats`."""
        return self.async_llm.get_metrics()

    # -------------------------------------------------------------------------------------------------------- control

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Removes the pages that no request uses from the prefix cache; arguments and result as `AsyncLLM`'s."""
        return self.run(self.async_llm.reset_prefix_cache(reset_running_requests, reset_connector))

    def reset_mm_cache(self) -> None:
        """Forgets the processed media that are kept for later prompts."""
        self.run(self.async_llm.reset_mm_cache())

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts to record a timeline of engine and workers. Needs `profiler_config`."""
        self.run(
            self.async_llm.start_profile(
                profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations
            )
        )

    def stop_profile(self) -> str | None:
        """Ends the recording and writes it, as a Chrome trace, into `torch_profiler_dir`; returns the file's path."""
        return self.run(self.async_llm.stop_profile())

    def do_log_stats(self) -> None:
        """Logs a line of statistics now."""
        self.run(self.async_llm.do_log_stats())

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls something on every worker between two steps; see `AsyncLLM.collective_rpc`."""
        return self.run(self.async_llm.collective_rpc(method, timeout, args, kwargs))

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """The results of `func` on each worker's model, by rank. The model has the interface of
        `quire.executor.models.base.Model`, and is no torch module.
        """
        return self.collective_rpc("apply_model", args=(func,))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain(type(self), name))


async def _read(stream: RequestStream | PoolingStream | ChunkedVectors, news: _News) -> None:
    """Hands the outputs of a stream to a thread. Knows no engine, which would never be collected otherwise."""
    try:
        async for output in stream:
            news.put((stream.request_id, output))
    except Exception as error:  # whatever it is, a thread waits for it
        news.put((stream.request_id, error))
    finally:
        stream.close()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _end(thread: EventLoopThread, llm: AsyncLLM) -> None:
    if thread.is_inherited:  # a forked process ends, which must not end its parent's engine
        return
    try:
        if not thread.is_current:  # the garbage collector may run in the event loop's own thread
            thread.run(llm.aclose())
    finally:
        llm.shutdown()
        thread.close()

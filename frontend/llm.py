"""The blocking Python API: `LLM(model).generate(prompts)` for scripts and notebooks."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from quire.core.config.resolved import EngineConfig
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.launch.engine_options import EngineOptions
from quire.frontend.metrics.reader import Metric
from quire.frontend.offline.arguments import LoRAs, adapters_of, prompts_of
from quire.frontend.offline.batch import Batch, BatchRunner
from quire.frontend.offline.batch_builder import BatchBuilder, ContentChoice, Conversations, Params
from quire.frontend.offline.engine import LLMEngine
from quire.frontend.offline.vector_llm import VectorLLM
from quire.frontend.outputs import RequestOutput
from quire.frontend.progress import MakeBar, RequestProgress, open_progress
from quire.frontend.refusals.methods import explain
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.beam_search import BeamSearchOutput
from quire.frontend.requests.prompt import PromptLike
from quire.frontend.text.chat_template import read_template

T = TypeVar("T")


class LLM(VectorLLM):
    """A model for offline work.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
            print(output.outputs[0].text)

    The engine runs in a process of its own. `shutdown`, or leaving the `with` block, ends the engine; so does the end
    of the interpreter.

    Args:
        model: folder or hub id; None for the embedded demo model.
        chat_template: a Jinja template for `chat`, or a file with one; None for the checkpoint's.
        options: any engine option, by the flag's name: `max_model_len=4096`, `tensor_parallel_size=2`. Statistics are
            neither counted nor logged unless `disable_log_stats=False`.

    Raises:
        ConfigError: an option or the checkpoint is wrong.

    Attributes:
        llm_engine: the engine, and the thread that talks to it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        template = None if chat_template is None else read_template(os.fspath(chat_template))
        options.setdefault("disable_log_stats", True)
        super().__init__(LLMEngine(AsyncLLM.from_engine_args(usage="llm", model=model, **options)), template)
        self.model_config = self.llm_engine.model_config
        self._llm = self.llm_engine.async_llm
        self._builder = BatchBuilder(self._llm, template)
        self._batches = BatchRunner(self._llm)

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> "LLM":
        """A model with these options."""
        return cls(**vars(engine_args))

    # --------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | MakeBar | None = None,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; outputs are in the order of the prompts.

        Args:
            prompts: one or many; each a text, a list of token ids, a `TextPrompt`, a `TokensPrompt`, or with
                `enable_prompt_embeds=True` an `EmbedsPrompt`.
            sampling_params: for all prompts, or one each; None for the checkpoint's defaults. If `max_tokens` does not
                fit the context, the output ends at the context's limit.
            use_tqdm: show a progress bar; None shows it only on a terminal. A function makes the bar, as `tqdm` does.
            lora_request: an adapter for all prompts, or one each; needs `enable_lora=True`.
            priority: one number for all, or one a prompt; lower runs first, with `scheduling_policy="priority"`.
            tokenization_kwargs: see `Tokenization.read`.
            mm_processor_kwargs: keywords of the model's processor, for the images, videos and sounds of all prompts.

        Raises:
            ParameterError: a prompt or parameter is wrong; all running requests are aborted.
        """
        batch = self._builder.of_prompts(
            prompts, sampling_params, priority, lora_request, tokenization_kwargs, mm_processor_kwargs
        )
        return self._run(batch, use_tqdm)

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        use_tqdm: bool | MakeBar | None = None,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentChoice = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several. A conversation is a list of OpenAI-style messages.

        Args:
            chat_template: a Jinja template for this call; None for the one of `LLM`.
            tokenization_kwargs: as for `generate`, but special tokens are left to the template.
            mm_processor_kwargs: as for `generate`.

        Raises:
            ParameterError: the template refuses a conversation, or a parameter is wrong.
        """
        build = self._builder.of_conversations(
            messages,
            sampling_params,
            priority,
            lora_request,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._run(self.llm_engine.run(build), use_tqdm)

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: Params = None,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | MakeBar | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Hands prompts to the engine, which works on them from now on, and returns the requests' ids.

        `wait_for_completion` returns their outputs. Arguments and errors are those of `generate`.
        """
        batch = self._builder.of_prompts(
            prompts, sampling_params, priority, lora_request, tokenization_kwargs, mm_processor_kwargs
        )
        return self._submit(batch, use_tqdm)

    def enqueue_chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        use_tqdm: bool | MakeBar | None = None,
        lora_request: LoRAs = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentChoice = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Like `enqueue`, with the arguments and errors of `chat`."""
        build = self._builder.of_conversations(
            messages,
            sampling_params,
            priority,
            lora_request,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._submit(self.llm_engine.run(build), use_tqdm)

    def wait_for_completion(
        self, output_type: type | tuple[type, ...] | None = None, *, use_tqdm: bool | MakeBar | None = None
    ) -> list[RequestOutput]:
        """The outputs of everything that was enqueued, in that order; waits until all are complete.

        Args:
            output_type: what the outputs are expected to be: `RequestOutput`, the only kind there is.

        Raises:
            QuireError: the engine failed at a request; the others are aborted.
        """
        if output_type is not None and not issubclass(RequestOutput, output_type):
            raise TypeError(f"Outputs are RequestOutput, not {output_type}.")
        with open_progress("Generating", self._batches.num_submitted, use_tqdm) as progress:
            return self.llm_engine.run(self._batches.wait(_counted_by(progress)))

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        lora_request: LoRAs = None,
        use_tqdm: bool | MakeBar | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest completions of each prompt, best first; outputs are in the order of the prompts.

        Args:
            prompts: as for `generate`.
            params: for all prompts.
            use_tqdm: as for `generate`.
            concurrency_limit: prompts searched at once; None for as many as the engine's queue takes.

        Raises:
            ParameterError: a prompt or parameter is wrong; all running searches are aborted.
        """
        many = prompts_of(prompts)
        adapters = adapters_of(lora_request, len(many))
        with open_progress("Searching", len(many), use_tqdm) as progress:
            search = self._batches.search(many, params, adapters, concurrency_limit, _counted_by(progress))
            return self.llm_engine.run(search)

    def _run(self, batch: Batch, use_tqdm: bool | MakeBar | None) -> list[RequestOutput]:
        with open_progress("Generating", len(batch.prompts), use_tqdm) as progress:
            return self.llm_engine.run(self._batches.run(batch, _counted_by(progress)))

    def _submit(self, batch: Batch, use_tqdm: bool | MakeBar | None) -> list[str]:
        with open_progress("Adding", len(batch.prompts), use_tqdm) as progress:
            return self.llm_engine.run(self._batches.submit(batch, lambda: progress.advance(0)))

    # -------------------------------------------------------------------------------------------------------- others

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as Transformers' own class."""
        return self._llm.get_tokenizer()

    @property
    def config(self) -> EngineConfig:
        """The engine's resolved options."""
        return self._llm.config

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's defaults for sampling parameters."""
        return self._llm.get_default_sampling_params()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Workers of one engine, or with `include_dp` of all engines."""
        layout = self.config.layout
        return layout.num_workers * (layout.data if include_dp else 1)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model can do, by vLLM's names."""
        return self.llm_engine.get_supported_tasks()

    def get_metrics(self) -> list[Metric]:
        """The metrics at this moment, by vLLM's names. Needs `disable_log_stats=False`."""
        return self._llm.get_metrics()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls something on every worker between two steps; see `AsyncLLM.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """The results of `func` on each worker's model, by rank; see `LLMEngine.apply_model`."""
        return self.llm_engine.apply_model(func)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Removes the pages that no request uses from the prefix cache; arguments and result as `AsyncLLM`'s."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Forgets the processed media that are kept for later prompts."""
        self.llm_engine.reset_mm_cache()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Starts to record a timeline of engine and workers. Needs `profiler_config`."""
        self.llm_engine.start_profile(profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)

    def stop_profile(self) -> str | None:
        """Ends the recording and writes it, as a Chrome trace, into `torch_profiler_dir`; returns the file's path."""
        return self.llm_engine.stop_profile()

    def shutdown(self) -> None:
        """Ends the engine. Idempotent."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain(type(self), name))


def _counted_by(progress: RequestProgress) -> Callable[[RequestOutput], None]:
    return lambda output: progress.advance(sum(len(each.token_ids) for each in output.outputs))

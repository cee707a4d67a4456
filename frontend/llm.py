"""The blocking Python API: `LLM(model).generate(prompts)` for scripts and notebooks."""

import asyncio
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ParameterError
from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.launch.event_loop import EventLoopThread
from quire.frontend.outputs import RequestOutput
from quire.frontend.progress import open_progress
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.beam_search import BeamSearchOutput
from quire.frontend.requests.prompt import Prompt, PromptLike
from quire.frontend.text.chat_template import Message

_TOKENIZED_AT_ONCE = 256
"""Prompts per batch of tokenization. The engine works on the first batch while the second is tokenized."""

OnOutput = Callable[[RequestOutput], None]


class LLM:
    """A model for offline work.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
            print(output.outputs[0].text)

    The engine runs in a process of its own. `shutdown`, or leaving the `with` block, ends the engine; so does the end
    of the interpreter.

    Args:
        model: folder or hub id; None for the embedded demo model.
        options: any engine option, by the flag's name: `max_model_len=4096`, `tensor_parallel_size=2`.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._thread = EventLoopThread("quire-llm")
        try:
            self._llm = AsyncLLM.from_engine_args(usage="llm", model=model, **options)
        except BaseException:
            self._thread.close()
            raise
        # The finalizer must not refer to self, or self would never be collected. It runs at interpreter exit, too.
        self._end = weakref.finalize(self, _end, self._thread, self._llm)
        self._request_numbers = itertools.count()
        try:
            self._thread.run(self._llm.start())
        except BaseException:
            self._end()
            raise

    # --------------------------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; outputs are in the order of the prompts.

        Args:
            prompts: one or many; each a text, a list of token ids, `{"prompt_token_ids": [...]}`, or with
                `enable_prompt_embeds=True` `{"prompt_embeds": rows}`, a tensor or an array [num_tokens, hidden].
            sampling_params: for all prompts, or one each; None for the checkpoint's defaults. If `max_tokens` does not
                fit the context, the output ends at the context's limit.
            use_tqdm: show a progress bar; None shows it only on a terminal.
            priority: one number a prompt; lower runs first, with `scheduling_policy="priority"`.

        Raises:
            ParameterError: a prompt or parameter is wrong; all running requests are aborted.
        """
        many = _listed(prompts)
        return self._run(many, _one_each(many, sampling_params), priority, use_tqdm, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several. A conversation is a list of OpenAI-style messages.

        Raises:
            ParameterError: the template refuses a conversation, or a parameter is wrong.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts: list[PromptLike] = [
            self._llm.chat_templates.render(
                list(conversation),  # type: ignore[arg-type]
                tools=tools,
                chat_template=chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(prompts, _one_each(prompts, sampling_params), None, use_tqdm, add_special_tokens=False)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest completions of each prompt, best first; outputs are in the order of the prompts.

        Args:
            prompts: as for `generate`.
            params: for all prompts.
            use_tqdm: show a progress bar; None shows it only on a terminal.
            concurrency_limit: prompts searched at once; None for as many as the engine's queue takes.

        Raises:
            ParameterError: a prompt or parameter is wrong; all running searches are aborted.
        """
        many = _listed(prompts)
        with open_progress("Searching", len(many), use_tqdm) as progress:

            def on_output(output: RequestOutput) -> None:
                progress.advance(sum(len(each.token_ids) for each in output.outputs))

            return self._thread.run(self._search_all(many, params, concurrency_limit, on_output))

    async def _search_all(
        self, prompts: list[PromptLike], params: BeamSearchParams, limit: int | None, on_output: OnOutput
    ) -> list[BeamSearchOutput]:
        queue = self._llm.config.limits.max_num_queued_reqs or len(prompts) * params.beam_width
        places = asyncio.Semaphore(limit or max(1, queue // params.beam_width))

        async def search(prompt: PromptLike) -> BeamSearchOutput:
            async with places:
                found = await self._llm.open_beams(prompt, params, f"llm-{next(self._request_numbers)}")
                sequences = await found.sequences()
                on_output(found.output(sequences))
                return BeamSearchOutput([found.with_prompt(each) for each in sequences])

        tasks = [asyncio.create_task(search(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if a task failed or the caller gave up, the others end
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _run(
        self,
        prompts: list[PromptLike],
        params: list[SamplingParams | None],
        priority: Sequence[int] | None,
        use_tqdm: bool | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prompts):
            raise ParameterError(
                f"priority has {len(priority)} entries for {len(prompts)} prompts; give one each.", param="priority"
            )
        priorities = list(priority or [0] * len(prompts))
        with open_progress("Generating", len(prompts), use_tqdm) as progress:

            def on_output(output: RequestOutput) -> None:
                progress.advance(output.metrics.num_generation_tokens if output.metrics else 0)

            return self._thread.run(self._generate_all(prompts, params, priorities, add_special_tokens, on_output))

    async def _generate_all(
        self,
        prompts: list[PromptLike],
        params: list[SamplingParams | None],
        priorities: list[int],
        add_special_tokens: bool,
        on_output: OnOutput,
    ) -> list[RequestOutput]:
        """Submits all prompts at once, or as many as the engine's queue takes."""
        places = asyncio.Semaphore(self._llm.config.limits.max_num_queued_reqs or len(prompts) or 1)
        tasks: list[asyncio.Task[RequestOutput]] = []
        try:
            for start in range(0, len(prompts), _TOKENIZED_AT_ONCE):
                batch = slice(start, start + _TOKENIZED_AT_ONCE)
                tokenized = await self._tokenize(prompts[batch], add_special_tokens)
                for prompt, sampling, priority in zip(tokenized, params[batch], priorities[batch], strict=True):
                    work = self._generate_one(prompt, sampling, priority, places, on_output)
                    tasks.append(asyncio.create_task(work))
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if a task failed or the caller gave up, the others end
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tokenize(self, prompts: list[PromptLike], add_special_tokens: bool) -> list[PromptLike | Prompt]:
        """The prompts, with token ids added to those that are plain text."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [*prompts]
        tokenize = self._llm.async_tokenizer.tokenize_batch
        rows = iter(await tokenize(texts, add_special_tokens=add_special_tokens))
        return [Prompt(prompt, next(rows)) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _generate_one(
        self,
        prompt: PromptLike | Prompt,
        sampling: SamplingParams | None,
        priority: int,
        places: asyncio.Semaphore,
        on_output: OnOutput,
    ) -> RequestOutput:
        sampling = sampling or self.get_default_sampling_params()
        async with places:
            stream = await self._llm.open(
                prompt,
                sampling.replace(output_kind=RequestOutputKind.FINAL_ONLY),
                f"llm-{next(self._request_numbers)}",
                priority=priority,
                fit_context=True,
            )
            try:
                async for output in stream:
                    on_output(output)
                    return output
            finally:
                stream.close()
        raise AssertionError("a stream ends with an output")

    # -------------------------------------------------------------------------------------------------------- others

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as Transformers' own class."""
        from transformers import AutoTokenizer  # imported here: it takes 5 s, and nothing else needs it

        return AutoTokenizer.from_pretrained(str(self._llm.async_tokenizer.tokenizer.folder))

    @property
    def config(self) -> EngineConfig:
        """The engine's resolved options."""
        return self._llm.config

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's defaults for sampling parameters."""
        return self._llm.get_default_sampling_params()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Removes the pages that no request uses from the prefix cache; arguments and result as `AsyncLLM`'s."""
        return self._thread.run(self._llm.reset_prefix_cache(reset_running_requests, reset_connector))

    def start_profile(self) -> None:
        """Starts to record a timeline of engine and workers. Needs `profiler_config`."""
        self._thread.run(self._llm.start_profile())

    def stop_profile(self) -> str | None:
        """Ends the recording and writes it, as a Chrome trace, into `torch_profiler_dir`; returns the file's path."""
        return self._thread.run(self._llm.stop_profile())

    def shutdown(self) -> None:
        """Ends the engine. Idempotent."""
        self._end()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _end(thread: EventLoopThread, llm: AsyncLLM) -> None:
    if thread.is_inherited:  # a forked process ends, which must not end its parent's engine
        return
    try:
        if not thread.is_current:  # the garbage collector may run in the event loop's own thread
            thread.run(llm.aclose())
    finally:
        llm.shutdown()
        thread.close()


def _listed(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """The prompts as a list. A list of numbers is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ParameterError(f"prompts must be one prompt or a list, not {type(prompts).__name__}.", param="prompts")
    many: list[Any] = list(prompts)
    return [many] if many and all(isinstance(each, int) for each in many) else many


def _one_each(
    prompts: list[PromptLike], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(prompts)
    if not isinstance(sampling_params, (list, tuple)) or not all(
        isinstance(each, SamplingParams) or each is None for each in sampling_params
    ):
        raise ParameterError("sampling_params must be SamplingParams, or a list of them.", param="sampling_params")
    if len(sampling_params) != len(prompts):
        raise ParameterError(
            f"sampling_params has {len(sampling_params)} entries for {len(prompts)} prompts; give one, or one each.",
            param="sampling_params",
        )
    return list(sampling_params)

"""Many prompts at once: hands them to the engine as fast as its queue takes them, and collects their outputs."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from quire.core.wire.sampling_params import RequestOutputKind, SamplingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.beam_params import BeamSearchParams
from quire.frontend.requests.beam_search import BeamSearchOutput
from quire.frontend.requests.prompt import Prompt, PromptLike
from quire.frontend.requests.submission import Submission
from quire.frontend.requests.tokenization import Tokenization

_TOKENIZED_AT_ONCE = 256
"""Prompts per batch of tokenization. The engine works on the first batch while the second is tokenized."""

OnOutput = Callable[[RequestOutput], None]


class Batch(NamedTuple):
    """Prompts, with an entry of the other lists for each."""

    prompts: Sequence[PromptLike]
    params: Sequence[SamplingParams]
    priorities: Sequence[int]
    adapters: Sequence[LoRARequest | None]
    tokenization: Tokenization = Tokenization()


class _Running(NamedTuple):
    """A request whose output is awaited. `opened` is done when the engine has the request."""

    request_id: str
    opened: asyncio.Future[None]
    output: asyncio.Task[RequestOutput]


class BatchRunner:
    """Runs batches, and keeps the requests that were submitted and not waited for."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._numbers = itertools.count()
        self._submitted: list[_Running] = []

    @property
    def num_submitted(self) -> int:
        """Requests that `wait` will return."""
        return len(self._submitted)

    def _next_id(self) -> str:
        return str(next(self._numbers))

    async def run(self, batch: Batch, on_output: OnOutput) -> list[RequestOutput]:
        """The outputs of a batch, in order. If one fails, all end."""
        running: list[_Running] = []
        async with _ended(running):
            async for each in self._start(batch):
                each.output.add_done_callback(_report_progress(on_output))
                running.append(each)
            return await asyncio.gather(*(each.output for each in running))

    async def submit(self, batch: Batch, on_opened: Callable[[], None]) -> list[str]:
        """Hands a batch to the engine, which works on it from now on; returns the requests' ids. If one fails, all end.

        Args:
            on_opened: called when the engine has a request.
        """
        running: list[_Running] = []
        try:
            async for each in self._start(batch):
                running.append(each)
            for each in running:
                waits: list[asyncio.Future[Any]] = [each.opened, each.output]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not each.opened.done():
                    each.output.result()
                on_opened()
        except BaseException:
            async with _ended(running):
                raise
        self._submitted += running
        return [each.request_id for each in running]

    async def wait(self, on_output: OnOutput) -> list[RequestOutput]:
        """The outputs of all submitted requests, in order. If one fails, all end."""
        running, self._submitted = self._submitted, []
        async with _ended(running):
            for each in running:
                each.output.add_done_callback(_report_progress(on_output))
            return await asyncio.gather(*(each.output for each in running))

    async def search(
        self,
        prompts: Sequence[PromptLike],
        params: BeamSearchParams,
        adapters: Sequence[LoRARequest | None],
        limit: int | None,
        on_output: OnOutput,
    ) -> list[BeamSearchOutput]:
        """The likeliest completions of each prompt. If one fails, all end.

        Args:
            limit: prompts searched at once; None for as many as the engine's queue takes.
        """
        queue = self._llm.config.limits.max_num_queued_reqs or len(prompts) * params.beam_width
        places = asyncio.Semaphore(limit or max(1, queue // params.beam_width))

        async def search(prompt: PromptLike, adapter: LoRARequest | None) -> BeamSearchOutput:
            async with places:
                found = await self._llm.open_beams(Submission(prompt, params, self._next_id(), adapter=adapter))
                sequences = await found.sequences()
                on_output(found.output(sequences))
                return BeamSearchOutput([found.with_prompt(each) for each in sequences])

        tasks = [asyncio.create_task(search(*each)) for each in zip(prompts, adapters, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def _start(self, batch: Batch) -> AsyncIterator[_Running]:
        """Starts a task for each prompt; as many at once hand theirs over as the engine's queue takes."""
        prompts, tokenization = batch.prompts, batch.tokenization
        places = asyncio.Semaphore(self._llm.config.limits.max_num_queued_reqs or len(prompts) or 1)
        for start in range(0, len(prompts), _TOKENIZED_AT_ONCE):
            part = slice(start, start + _TOKENIZED_AT_ONCE)
            tokenized = await self._tokenize(prompts[part], tokenization.add_special_tokens)
            rows = zip(tokenized, batch.params[part], batch.priorities[part], batch.adapters[part], strict=True)
            for prompt, sampling, priority, adapter in rows:
                request_id = self._next_id()
                opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                work = self._generate(request_id, prompt, sampling, priority, adapter, tokenization, places, opened)
                yield _Running(request_id, opened, asyncio.create_task(work))

    async def _tokenize(self, prompts: Sequence[PromptLike], add_special_tokens: bool) -> list[PromptLike | Prompt]:
        """Adds token ids to the prompts that are plain text."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [*prompts]
        tokenize = self._llm.async_tokenizer.tokenize_batch
        rows = iter(await tokenize(texts, add_special_tokens=add_special_tokens))
        return [Prompt(prompt, next(rows)) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _generate(
        self,
        request_id: str,
        prompt: PromptLike | Prompt,
        sampling: SamplingParams,
        priority: int,
        adapter: LoRARequest | None,
        tokenization: Tokenization,
        places: asyncio.Semaphore,
        opened: asyncio.Future[None],
    ) -> RequestOutput:
        async with places:
            stream = await self._llm.open_stream(
                Submission(
                    prompt,
                    sampling.replace(output_kind=RequestOutputKind.FINAL_ONLY),
                    request_id,
                    priority=priority,
                    add_special_tokens=tokenization.add_special_tokens,
                    truncation=tokenization.truncation,
                    fit_context=True,
                    adapter=adapter,
                ),
            )
            opened.set_result(None)
            try:
                async for output in stream:
                    return output
            finally:
                stream.close()
        raise AssertionError("a stream ends with an output")


@contextlib.asynccontextmanager
async def _ended(running: list[_Running]) -> AsyncIterator[None]:
    """Ends the requests that still run when the block is left: one failed, or the caller gave up."""
    try:
        yield
    finally:
        await _end([each.output for each in running])


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report_progress(on_output: OnOutput) -> Callable[[asyncio.Task[RequestOutput]], None]:
    def on_done(task: asyncio.Task[RequestOutput]) -> None:
        if not task.cancelled() and task.exception() is None:
            on_output(task.result())

    return on_done

"""Many prompts for vectors at once: hands them to the engine as fast as its queue takes them; equal ones are computed
once."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from quire.core.wire.adapters import Adapter
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.outputs import PoolingOutput, PoolingRequestOutput
from quire.frontend.requests.prompt import Prompt, PromptLike
from quire.frontend.requests.submission import Submission
from quire.frontend.requests.tokenization import Tokenization

_TOKENIZED_AT_ONCE = 256
"""Prompts per batch of tokenization. The engine works on the first batch while the second is tokenized."""

VectorsOutput = PoolingRequestOutput[PoolingOutput]
OnVectors = Callable[[VectorsOutput], None]


class VectorBatch(NamedTuple):
    """Prompts, with parameters for each."""

    prompts: Sequence[PromptLike | Prompt]
    params: Sequence[PoolingParams]
    adapters: Sequence[LoRARequest | Adapter | None]
    tokenization: Tokenization = Tokenization()
    num_lead_tokens: int = 0  # of each text; see `Prompt`


class VectorRunner:
    """Runs batches.

    Args:
        llm: its engine is shared with other requests.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._numbers = itertools.count()

    async def run(self, batch: VectorBatch, on_output: OnVectors) -> list[VectorsOutput]:
        """The outputs of a batch, in order. If one fails, all end."""
        tasks: dict[object, asyncio.Task[VectorsOutput]] = {}
        wanted: list[tuple[str, asyncio.Task[VectorsOutput]]] = []
        places = asyncio.Semaphore(self._llm.config.limits.max_num_queued_reqs or len(batch.prompts) or 1)
        try:
            for start in range(0, len(batch.prompts), _TOKENIZED_AT_ONCE):
                part = slice(start, start + _TOKENIZED_AT_ONCE)
                read = await self._read(batch.prompts[part], batch)
                for prompt, params, adapter in zip(read, batch.params[part], batch.adapters[part], strict=True):
                    number, key = str(next(self._numbers)), _key_of(prompt, params, adapter)
                    if key is None or key not in tasks:
                        work = self._compute(number, prompt, params, adapter, batch.tokenization, places)
                        tasks[number if key is None else key] = asyncio.create_task(work)
                    task = tasks[number if key is None else key]
                    task.add_done_callback(_report_progress(on_output))
                    wanted.append((number, task))
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [_named(task.result(), number) for number, task in wanted]

    async def _read(self, prompts: Sequence[PromptLike | Prompt], batch: VectorBatch) -> list[PromptLike | Prompt]:
        """Adds token ids to the prompts that are plain text."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [*prompts]
        tokenize = self._llm.async_tokenizer.tokenize_batch
        rows = iter(await tokenize(texts, add_special_tokens=batch.tokenization.add_special_tokens))
        lead = batch.num_lead_tokens
        return [
            Prompt(prompt, next(rows), num_lead_tokens=lead) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    async def _compute(
        self,
        number: str,
        prompt: PromptLike | Prompt,
        params: PoolingParams,
        adapter: LoRARequest | Adapter | None,
        tokenization: Tokenization,
        places: asyncio.Semaphore,
    ) -> VectorsOutput:
        async with places:
            stream = await self._llm.open_vectors(
                Submission(
                    prompt,
                    params,
                    number,
                    add_special_tokens=tokenization.add_special_tokens,
                    truncation=tokenization.truncation,
                    adapter=adapter,
                )
            )
            try:
                return await stream.output()
            finally:
                stream.close()


def _key_of(prompt: PromptLike | Prompt, params: PoolingParams, adapter: LoRARequest | Adapter | None) -> object:
    """The same for prompts whose outputs are the same; None for one that is computed by itself."""
    if isinstance(prompt, Prompt) and prompt.embeds is None:
        return *prompt.content, msgspec.msgpack.encode(params), adapter
    if isinstance(prompt, list):
        return *Prompt(None, prompt).content, msgspec.msgpack.encode(params), adapter
    return None


def _named(output: VectorsOutput, number: str) -> VectorsOutput:
    """The output under the number of one of its requests."""
    return output if output.request_id == number else msgspec.structs.replace(output, request_id=number)


def _report_progress(on_output: OnVectors) -> Callable[[asyncio.Task[VectorsOutput]], None]:
    def on_done(task: asyncio.Task[VectorsOutput]) -> None:
        if not task.cancelled() and task.exception() is None:
            on_output(task.result())

    return on_done

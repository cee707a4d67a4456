"""The scores of pairs of texts, in the way that the model has for them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.core.wire.pooling import PoolingTask
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.pooling.encoding import Caller, Encoding, VectorsOutput
from quire.frontend.pooling.inputs import Inputs
from quire.frontend.pooling.tasks import Tasks
from quire.frontend.requests.comparisons import cosine, late_interaction
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.ranked_lists import check_list_options, list_scores, lists_of, write_list
from quire.frontend.requests.scored_pairs import PairOptions, PairWriter, Sides
from quire.frontend.requests.time_slices import in_time_slices

if TYPE_CHECKING:
    import numpy as np

Outputs = Sequence[VectorsOutput]


class PairScores(NamedTuple):
    """The score of each pair, and the tokens that were read for all."""

    scores: list[float]
    num_tokens: int


class PairScoring:
    """Scores pairs.

    Args:
        writer: writes pairs for models that read both texts at once.
    """

    def __init__(self, engine: AsyncLLM, inputs: Inputs, encoding: Encoding, tasks: Tasks, writer: PairWriter) -> None:
        self._engine = engine
        self._inputs = inputs
        self._encoding = encoding
        self._tasks = tasks
        self._writer = writer

    async def score(self, sides: Sides, options: PairOptions, caller: Caller) -> PairScores:
        """The scores of pairs; cancelling aborts them in the engine.

        Raises:
            ParameterError: the model makes no scores, or a text cannot be read.
            EngineError: the engine failed.
        """
        match self._tasks.comparison():
            case "pairs":
                return await self._read_together(sides, options, caller)
            case "vectors":
                return await self._compare(cosine, await self._read_apart(sides, options, caller, "embed"))
            case "token vectors":
                outputs = await self._read_apart(sides, options, caller, "token_embed")
                return await self._compare(late_interaction, outputs)
            case "lists":
                return await self._read_lists(sides, options, caller)

    async def _compare(
        self, compare: "Callable[[np.ndarray, np.ndarray], float]", outputs: tuple[Outputs, Outputs]
    ) -> PairScores:
        """The scores of pairs of outputs, those of the queries and those of the documents."""
        queries, documents = outputs
        scores = []
        async for index, document in in_time_slices(enumerate(documents)):
            query = queries[index if len(queries) > 1 else 0]
            scores.append(compare(query.outputs.array, document.outputs.array))
        return PairScores(scores, _num_tokens([*queries, *documents]))

    async def _read_together(self, sides: Sides, options: PairOptions, caller: Caller) -> PairScores:
        first, second, names = sides
        queries = first * len(second) if len(first) == 1 else first
        prompts = await self._writer.write(list(zip(queries, second, strict=True)), options, names)
        params = PoolingParams(task="classify", use_activation=options.use_activation)
        outputs = await self._encoding.encode(prompts, params, caller)
        return PairScores([float(output.outputs.array[0]) for output in outputs], _num_tokens(outputs))

    async def _read_lists(self, sides: Sides, options: PairOptions, caller: Caller) -> PairScores:
        check_list_options(options)
        first = await self._writer.shorten(sides.first, options.first_limit, "max_tokens_per_query")
        second = await self._writer.shorten(sides.second, options.second_limit, "max_tokens_per_doc")
        texts = [write_list(*each, options.variables) for each in lists_of(first, second)]
        prompts = await self._inputs.read_prompts(texts, name=sides.names[1])
        prompts = self._inputs.fit(prompts, None, has_special_tokens=True, name=sides.names[1])
        params = PoolingParams(task="token_embed", use_activation=options.use_activation)
        outputs = await self._encoding.encode(prompts, params, caller)
        scores = [score for output in outputs for score in list_scores(output.outputs.array)]
        return PairScores(scores, _num_tokens(outputs))

    async def _read_apart(
        self, sides: Sides, options: PairOptions, caller: Caller, task: PoolingTask
    ) -> tuple[Outputs, Outputs]:
        """The outputs of the first texts and of the second ones, each text by itself."""
        first, second, names = sides
        fitting: list[Prompt] = []
        for name, texts, limit, field in (
            (names[0], first, options.first_limit, "max_tokens_per_query"),
            (names[1], second, options.second_limit, "max_tokens_per_doc"),
        ):
            cut = await self._writer.shorten(texts, limit, field)
            prompts = await self._inputs.read_prompts(cut, must_fit=options.truncation is None, name=name)
            fitting += self._inputs.fit(prompts, options.truncation, has_special_tokens=True, name=name)
        outputs = await self._encoding.encode(
            fitting, PoolingParams(task=task, use_activation=options.use_activation), caller
        )
        return outputs[: len(first)], outputs[len(first) :]


def _num_tokens(outputs: Outputs) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)

"""Scores of pairs of texts, for `LLM.score`: by two vectors, by the vectors of their tokens, or by a model that reads
both."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.errors import ParameterError
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.checkpoint.adapters import LoRARequest
from quire.frontend.offline.vectors import OnVectors, VectorBatch, VectorRunner, VectorsOutput
from quire.frontend.outputs import PoolingOutput, ScoringRequestOutput
from quire.frontend.requests.comparisons import cosine, late_interaction
from quire.frontend.requests.ranked_lists import check_list_options, list_scores, lists_of, write_list
from quire.frontend.requests.scored_pairs import PairOptions
from quire.frontend.requests.tokenization import Tokenization

if TYPE_CHECKING:
    import numpy as np

Compare = Callable[["np.ndarray", "np.ndarray"], float]
_COMPARISONS: dict[str, Compare] = {"embed": cosine, "token_embed": late_interaction}


def pairs_of(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    """The texts of both sides, equally many: one text on the first side pairs with each of the second.

    Raises:
        ParameterError: a side is no text and no list of them, or their numbers do not fit.
    """
    sides = []
    for name, given in (("data_1", data_1), ("data_2", data_2)):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
            raise ParameterError(f"{name} must be a text, or a list of at least one.", param=name)
        sides.append(list(texts))
    first, second = sides
    if len(first) not in (1, len(second)):
        raise ParameterError(
            f"data_1 has {len(first)} texts and data_2 {len(second)}; give one, or equally many.", param="data_1"
        )
    return first, second


class Scorer:
    """Scores pairs with one model.

    Args:
        runner: computes vectors and scores of prompts.
    """

    def __init__(self, llm: AsyncLLM, runner: VectorRunner) -> None:
        self._llm = llm
        self._runner = runner

    async def score(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        adapter: LoRARequest | None,
        tokenization: Tokenization,
        template: str | None,
        on_output: OnVectors,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair, of the first text with all second ones or with its own.

        Args:
            params: without a task, or with that of the model's scores.
            template: writes a pair as one prompt; None: the tokenizer does.

        Raises:
            ParameterError: the model makes no scores, or a text or a parameter is wrong.
        """
        spec = self._llm.config.pooling
        task = None if spec is None else spec.tasks[0]
        if (
            spec is None
            or task in ("token_classify", "embed&token_classify")
            or (task == "classify" and len(spec.classes) != 1)
        ):
            what = (
                "generates text" if spec is None else f"serves {', '.join(spec.tasks)} of {len(spec.classes)} classes"
            )
            raise ParameterError(
                f"{self._llm.model.name} {what}; scores need vectors (--convert embed), or exactly one class.",
                param="task",
            )
        if params.task not in (None, task):
            raise ParameterError(
                f"pooling_params are for the task {params.task}, not {task}; leave it out.", param="task"
            )
        assert task is not None
        params = params.clone()
        params.task = task
        if task == "classify":
            return await self._together(first, second, params, adapter, tokenization, template, on_output)
        if spec.ranking is not None:
            return await self._in_lists(first, second, params, adapter, tokenization, on_output)
        return await self._apart(first, second, params, adapter, tokenization, _COMPARISONS[task], on_output)

    async def _together(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        adapter: LoRARequest | None,
        tokenization: Tokenization,
        template: str | None,
        on_output: OnVectors,
    ) -> list[ScoringRequestOutput]:
        writer = self._llm.pair_writer(template)
        pairs = list(zip([*first] * len(second) if len(first) == 1 else first, second, strict=True))
        prompts = await writer.write(pairs, _options(params, tokenization), ("data_1", "data_2"))
        count = len(prompts)
        outputs = await self._runner.run(VectorBatch(prompts, [params] * count, [adapter] * count), on_output)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    async def _in_lists(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        adapter: LoRARequest | None,
        tokenization: Tokenization,
        on_output: OnVectors,
    ) -> list[ScoringRequestOutput]:
        options, writer = _options(params, tokenization), self._llm.pair_writer()
        check_list_options(options)
        queries = await writer.shorten(first, options.first_limit, "max_tokens_per_query")
        documents = await writer.shorten(second, options.second_limit, "max_tokens_per_doc")
        texts = [write_list(*each, options.variables) for each in lists_of(queries, documents)]
        batch = VectorBatch(texts, [params] * len(texts), [adapter] * len(texts), tokenization)
        outputs = await self._runner.run(batch, on_output)
        return [
            ScoringRequestOutput.from_base(msgspec.structs.replace(output, outputs=PoolingOutput.of([score])))
            for output in outputs
            for score in list_scores(output.outputs.array)
        ]

    async def _apart(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        adapter: LoRARequest | None,
        tokenization: Tokenization,
        compare: Compare,
        on_output: OnVectors,
    ) -> list[ScoringRequestOutput]:
        options, writer = _options(params, tokenization), self._llm.pair_writer()
        queries = await writer.shorten(first, options.first_limit, "max_tokens_per_query")
        documents = await writer.shorten(second, options.second_limit, "max_tokens_per_doc")
        count = len(first) + len(second)
        batch = VectorBatch([*queries, *documents], [params] * count, [adapter] * count, tokenization)
        outputs = await self._runner.run(batch, on_output)
        found = zip(outputs[: len(first)] * (len(second) if len(first) == 1 else 1), outputs[len(first) :], strict=True)
        return [_compared(query, document, compare, self._padding) for query, document in found]

    @property
    def _padding(self) -> list[int]:
        """The token that stands between the tokens of two prompts in an output, as in vLLM."""
        tokenizer = self._llm.async_tokenizer.tokenizer
        token = tokenizer.special_tokens.get("pad_token")
        token_id = None if token is None else tokenizer.token_id(token)
        return [] if token_id is None else [token_id]


def _options(params: PoolingParams, tokenization: Tokenization) -> PairOptions:
    extra = params.extra_kwargs or {}
    unknown = extra.keys() - {"max_tokens_per_query", "max_tokens_per_doc", "chat_template_kwargs"}
    if unknown:
        raise ParameterError(f"extra_kwargs cannot hold {sorted(unknown)[0]!r}.", param="extra_kwargs")
    return PairOptions(
        first_limit=extra.get("max_tokens_per_query") or None,
        second_limit=extra.get("max_tokens_per_doc") or None,
        truncation=tokenization.truncation,
        variables=extra.get("chat_template_kwargs") or {},
        use_activation=params.use_activation,
    )


def _compared(
    query: VectorsOutput, document: VectorsOutput, compare: Compare, padding: list[int]
) -> ScoringRequestOutput:
    score = compare(query.outputs.array, document.outputs.array)
    return ScoringRequestOutput.from_base(
        VectorsOutput(
            request_id=f"{query.request_id}_{document.request_id}",
            outputs=PoolingOutput.of([score]),
            prompt_token_ids=query.prompt_token_ids + padding + document.prompt_token_ids,
            num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
        )
    )

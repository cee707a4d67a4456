"""Answers requests in the form of Text Embeddings Inference."""

from collections.abc import Sequence
from typing import Any

from quire.core.errors import ParameterError
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.pooling.encoding import VectorsOutput
from quire.frontend.pooling.fields import MAX_INPUTS
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.pooling.tasks import WrongTaskError
from quire.frontend.pooling.vectors import json_numbers
from quire.frontend.requests.comparisons import cosine
from quire.frontend.requests.named_prompts import named_prompt
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.scored_pairs import PairOptions
from quire.frontend.requests.time_slices import in_time_slices
from quire.frontend.tei.answers import Prediction, Rank, SparseValue
from quire.frontend.tei.call import Call
from quire.frontend.tei.errors import EmptyInputError, TooMuchError
from quire.frontend.tei.schema import (
    Cut,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
)

Text = str | list[int]


class TextEmbeddings:
    """Answers the requests. Errors are RequestError and EngineError; cancelling aborts a request in the engine."""

    def __init__(self, engine: AsyncLLM, services: PoolingServices) -> None:
        self._engine = engine
        self._services = services

    async def embed(self, request: EmbedRequest, call: Call) -> list[Any]:
        """A vector for each input."""
        params = PoolingParams(
            task=self._services.tasks.choose("embed"),
            use_activation=request.normalize is not False,
            dimensions=request.dimensions,
        )
        outputs = await self._encode(texts_of(request.inputs), request, request.prompt_name, params, call)
        return [json_numbers(output.outputs.array) async for output in in_time_slices(outputs)]

    async def embed_all(self, request: EmbedAllRequest, call: Call) -> list[Any]:
        """The vectors of each input's tokens, as the model has them: not normalized."""
        params = PoolingParams(task=self._services.tasks.choose("token_embed"), use_activation=False)
        outputs = await self._encode(texts_of(request.inputs), request, request.prompt_name, params, call)
        return [json_numbers(output.outputs.array) async for output in in_time_slices(outputs)]

    async def embed_sparse(self, request: EmbedSparseRequest, call: Call) -> list[list[SparseValue]]:
        """For each input, the elements of its vector that are not zero.

        Raises:
            WrongTaskError: the model's vectors are not sparse.
        """
        tasks = self._services.tasks
        params = PoolingParams(task=tasks.choose("embed"), use_activation=False)
        if not tasks.spec.is_sparse:
            raise WrongTaskError(
                f"The model makes no sparse vectors: its pooling is {tasks.spec.sequence}. Ask /embed, or serve a "
                "model of SPLADE's kind.",
                param="model",
            )
        outputs = await self._encode(texts_of(request.inputs), request, request.prompt_name, params, call)
        found = []
        async for output in in_time_slices(outputs):
            vector = output.outputs.array
            [places] = vector.nonzero()
            found.append([SparseValue(*each) for each in zip(places.tolist(), vector[places].tolist(), strict=True)])
        return found

    async def similarity(self, request: SimilarityRequest, call: Call) -> list[float]:
        """The cosine of the source sentence with each other."""
        params = PoolingParams(task=self._services.tasks.choose("embed"))
        sentences: list[Text] = [*request.inputs.sentences]
        if not sentences:
            raise EmptyInputError("inputs.sentences must not be empty.", param="inputs")
        options = request.parameters
        cut = options or Cut()
        name = None if options is None else options.prompt_name
        source, *others = await self._encode([request.inputs.source_sentence, *sentences], cut, name, params, call)
        return [cosine(source.outputs.array, each.outputs.array) async for each in in_time_slices(others)]

    async def predict(self, request: PredictRequest, call: Call) -> list[Any]:
        """The labels of each input and their scores, the likeliest first; of one input, without a list around it."""
        task, names = self._services.tasks.choose("classify"), self._services.tasks.spec.classes
        sequences = request.sequences()
        _check_number(sequences)
        params = PoolingParams(task=task, use_activation=not request.raw_scores)
        texts: list[Text] = [each[0] for each in sequences if len(each) == 1]
        alone = iter(await self._read(texts, request, None, call))
        pairs = iter(
            await self._read_pairs([(each[0], each[1]) for each in sequences if len(each) == 2], request, call)
        )
        outputs = await self._compute([next(alone if len(each) == 1 else pairs) for each in sequences], params, call)
        found = []
        async for output in in_time_slices(outputs):
            scores = zip(output.outputs.array.tolist(), names, strict=True)
            found.append(sorted((Prediction(*each) for each in scores), key=lambda each: each.score, reverse=True))
        return found if request.is_batch else found[0]

    async def rerank(self, request: RerankRequest, call: Call) -> list[Rank]:
        """The texts by how well they answer the query, the best first."""
        if not request.texts:
            raise EmptyInputError("texts must not be empty.", param="texts")
        _check_number(request.texts)
        self._services.tasks.check_reads_pairs()
        pairs = [(request.query, text) for text in request.texts]
        prompts = await self._read_pairs(pairs, request, call, ("query", "texts"))
        params = PoolingParams(task="classify", use_activation=not request.raw_scores)
        outputs = await self._compute(prompts, params, call)
        ranks = [
            Rank(index=index, score=float(output.outputs.array[0]), text=text if request.return_text else None)
            for index, (text, output) in enumerate(zip(request.texts, outputs, strict=True))
        ]
        return sorted(ranks, key=lambda each: each.score, reverse=True)

    async def _encode(
        self, texts: Sequence[Text], cut: Cut, prompt_name: str | None, params: PoolingParams, call: Call
    ) -> list[VectorsOutput]:
        return await self._compute(await self._read(texts, cut, prompt_name, call), params, call)

    async def _compute(self, prompts: Sequence[Prompt], params: PoolingParams, call: Call) -> list[VectorsOutput]:
        outputs = await self._services.encoding.encode(prompts, params, call.caller)
        call.note(outputs)
        return outputs

    async def _read(self, texts: Sequence[Text], cut: Cut, prompt_name: str | None, call: Call) -> list[Prompt]:
        """The prompts of texts, with the named text before each."""
        _check_number(texts)
        before = ""
        if prompt_name is not None:
            texts, before = with_prompt(self._services, texts, prompt_name)
        if not texts:
            return []
        inputs = self._services.inputs
        with call.reading(texts):
            prompts = await inputs.read_prompts(texts, must_fit=False, name="inputs", before=before)
            if cut.truncation is None:
                self._check_lengths(prompts)
            return inputs.fit(prompts, cut.truncation, has_special_tokens=True, name="inputs")

    async def _read_pairs(
        self, pairs: Sequence[tuple[str, str]], cut: Cut, call: Call, names: tuple[str, str] = ("inputs", "inputs")
    ) -> list[Prompt]:
        """The prompts of pairs of texts."""
        with call.reading([text for pair in pairs for text in pair]):
            options = PairOptions(truncation=cut.truncation)
            prompts = await self._services.pair_writer.write(pairs, options, names, checks_lengths=False)
            self._check_lengths(prompts)
            return prompts

    def _check_lengths(self, prompts: Sequence[Prompt]) -> None:
        most = self._engine.max_model_len
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if longest > most and not self._services.tasks.spec.enable_chunked_processing:
            raise TooMuchError(
                f"inputs must have at most {most} tokens each, and one has {longest}; set truncate.", param="inputs"
            )


def texts_of(inputs: Any) -> list[Text]:
    """The inputs of a body one by one.

    Raises:
        ParameterError: there is none, or texts and token ids are mixed.
    """
    if not inputs:
        raise EmptyInputError("inputs must not be empty.", param="inputs")
    if isinstance(inputs, str):
        return [inputs]
    kinds = set(map(type, inputs))
    if kinds == {int}:
        return [inputs]
    if kinds <= {str, list} and all(set(map(type, each)) <= {int} for each in inputs if isinstance(each, list)):
        return list(inputs)
    raise ParameterError("inputs must be a text, token ids, or a list of these.", param="inputs")


def with_prompt(services: PoolingServices, texts: Sequence[Text], name: str) -> tuple[list[Text], str]:
    """The texts with one of the checkpoint's prompts before each, and that prompt.

    Raises:
        ParameterError: the checkpoint has none of this name, or an input is no text.
    """
    before = named_prompt(services.tasks.spec, name)
    if not all(isinstance(text, str) for text in texts):
        raise ParameterError("prompt_name is for texts, and inputs has token ids.", param="prompt_name")
    return [before + str(text) for text in texts], before


def _check_number(inputs: Sequence[Any]) -> None:
    if len(inputs) > MAX_INPUTS:
        raise TooMuchError(f"There are {len(inputs)} inputs, and one request may have {MAX_INPUTS}.", param="inputs")

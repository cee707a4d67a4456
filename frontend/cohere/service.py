"""Answers requests for embeddings in Cohere's form."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from quire.core.errors import ParameterError
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.renaming import renamed
from quire.frontend.cohere.answers import ApiVersion, BilledUnits, Embeddings, EmbedResponse, Meta
from quire.frontend.cohere.schema import EmbeddingType, EmbedRequest
from quire.frontend.pooling.encoding import Caller
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.pooling.vectors import base64_text, json_numbers
from quire.frontend.requests.prompt import Prompt
from quire.frontend.requests.time_slices import in_time_slices

if TYPE_CHECKING:
    import numpy as np

INPUT_TYPES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Cohere's types of input, and the names that checkpoints have for their texts."""


class CohereEmbeddings:
    """Answers the requests."""

    def __init__(self, engine: AsyncLLM, services: PoolingServices) -> None:
        self._engine = engine
        self._services = services

    async def embed(self, request: EmbedRequest, headers: ClientHeaders) -> EmbedResponse:
        """The vectors; cancelling aborts them in the engine. Raises RequestError and EngineError."""
        self._engine.model.choose(request.model)
        request.check()
        params = PoolingParams(task=self._services.tasks.choose("embed"), dimensions=request.output_dimension)
        texts = request.inputs_in_texts()
        prompts = await self._read(texts, request)
        caller = Caller(
            reply_id=f"embd-{headers.choose_id(None)}",
            priority=request.priority or 0,
            data_parallel_rank=headers.data_parallel_rank,
        )
        with renamed(dimensions="output_dimension"):
            outputs = await self._services.encoding.encode(prompts, params, caller)
        vectors = [output.outputs.array for output in outputs]
        rows = {kind: [_WRITERS[kind](each) async for each in in_time_slices(vectors)] for kind in request.types}
        return EmbedResponse(
            id=caller.reply_id,
            embeddings=Embeddings(**rows),
            texts=UNSET if request.texts is None else request.texts,
            meta=Meta(ApiVersion(), BilledUnits(sum(len(output.prompt_token_ids) for output in outputs))),
        )

    async def _read(self, texts: Sequence[str], request: EmbedRequest) -> list[Prompt]:
        before, inputs = self._text_before(request.input_type), self._services.inputs
        named = [before + text for text in texts]
        prompts = await inputs.read_prompts(named, must_fit=request.truncation is None, name="texts", before=before)
        if request.truncation is None and request.max_tokens is not None:
            longest = max(len(prompt.token_ids) for prompt in prompts)
            if longest > request.max_tokens:
                raise ParameterError(
                    f"An input has {longest} tokens, more than max_tokens {request.max_tokens}; set truncate to START "
                    "or END to cut it.",
                    param="max_tokens",
                )
        return inputs.fit(prompts, request.truncation, has_special_tokens=True, name="texts")

    def _text_before(self, input_type: str | None) -> str:
        """The text that the checkpoint has for a type of input.

        Cohere's own types are all the same to a checkpoint without such texts.
        """
        known = self._services.tasks.spec.prompts
        if input_type is None or (not known and input_type in INPUT_TYPES):
            return ""
        for name in INPUT_TYPES.get(input_type, (input_type,)):
            if name in known:
                return known[name]
        names = f"this model has {', '.join(sorted(known))}" if known else f"take one of {', '.join(INPUT_TYPES)}"
        raise ParameterError(f"There is no input_type {input_type!r}: {names}.", param="input_type")


def _bits(vector: "np.ndarray") -> Any:
    """A bit for each element that is not negative, the first one highest, padded to whole bytes."""
    import numpy as np  # imported here, because most servers do without

    return np.packbits(vector >= 0)


_WRITERS: dict[EmbeddingType, Callable[["np.ndarray"], Any]] = {
    "float": json_numbers,
    "base64": lambda vector: base64_text(vector, "float32", "little"),
    "binary": lambda vector: (_bits(vector).astype("i2") - 128).tolist(),
    "ubinary": lambda vector: _bits(vector).tolist(),
}

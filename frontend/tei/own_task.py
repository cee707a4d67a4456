"""The served model's own task, which routes without a task in their name answer."""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

from quire.frontend.http.json_request import decode_body
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.tei.call import Call
from quire.frontend.tei.schema import EmbedRequest, EmbedSparseRequest, PredictRequest, RerankRequest
from quire.frontend.tei.service import TextEmbeddings

OwnRequest = EmbedRequest | EmbedSparseRequest | PredictRequest | RerankRequest


class Given(Struct):
    """The field that tells a body for ranks from others."""

    texts: Raw | UnsetType = UNSET


class OwnTask:
    """Answers bodies as /rerank, /embed, /embed_sparse or /predict does."""

    def __init__(self, services: PoolingServices, texts: TextEmbeddings) -> None:
        self._tasks = services.tasks
        self._texts = texts

    def kind_of(self, body: bytes) -> type[OwnRequest]:
        """The type of a body: of ranks if it has `texts`, else by the model.

        Raises:
            ParameterError: it is no JSON object.
            WrongTaskError: the model generates text.
        """
        if decode_body(body, Given).texts is not UNSET:
            return RerankRequest
        if not self._tasks.spec.embeds:
            return PredictRequest
        return EmbedSparseRequest if self._tasks.spec.is_sparse else EmbedRequest

    async def answer(self, request: OwnRequest, call: Call) -> list[Any]:
        """The answer to a body; errors are those of its route."""
        match request:
            case RerankRequest():
                return await self._texts.rerank(request, call)
            case PredictRequest():
                return await self._texts.predict(request, call)
            case EmbedSparseRequest():
                return await self._texts.embed_sparse(request, call)
            case EmbedRequest():
                return await self._texts.embed(request, call)

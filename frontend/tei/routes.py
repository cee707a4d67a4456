"""The routes of Text Embeddings Inference."""

from typing import Any

from litestar import Router, get, post
from litestar.types import ASGIApp
from msgspec import UNSET, Raw, Struct, UnsetType

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.answers import HttpAnswers, documented, json_answer
from quire.frontend.http.errors import ErrorBody, ErrorReporter
from quire.frontend.http.json_request import JsonRequest, decode_body
from quire.frontend.http.pages.openapi_document import BODY
from quire.frontend.pooling import schema as jina
from quire.frontend.pooling.answers import RerankResponse
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.tei.answers import Info, Prediction, Rank, SparseValue, TeiError
from quire.frontend.tei.errors import TeiErrors
from quire.frontend.tei.info import describe_model
from quire.frontend.tei.schema import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
)
from quire.frontend.tei.service import TextEmbeddings


def tei_routes(
    engine: AsyncLLM, services: PoolingServices, texts: TextEmbeddings, answers: HttpAnswers, errors: ErrorReporter
) -> Router:
    """Handlers of /embed, /embed_all, /embed_sparse, /predict, /similarity and /info."""

    @post("/embed", status_code=200, responses=documented(list[list[float]], TeiError), summary="Embed (TEI)")
    async def embed(request: JsonRequest, data: EmbedRequest) -> ASGIApp:
        """A vector for each input."""
        answers.check_ready()
        return await answers.whole(texts.embed(data, ClientHeaders.read(request.headers)), request)

    @post(
        "/embed_all",
        status_code=200,
        responses=documented(list[list[list[float]]], TeiError),
        summary="Embed tokens (TEI)",
    )
    async def embed_all(request: JsonRequest, data: EmbedAllRequest) -> ASGIApp:
        """A vector for each token of each input, without pooling."""
        answers.check_ready()
        return await answers.whole(texts.embed_all(data, ClientHeaders.read(request.headers)), request)

    @post(
        "/embed_sparse",
        status_code=200,
        responses=documented(list[list[SparseValue]], TeiError),
        summary="Embed sparsely (TEI)",
    )
    async def embed_sparse(request: JsonRequest, data: EmbedSparseRequest) -> ASGIApp:
        """The elements of each input's vector that are not zero."""
        answers.check_ready()
        return await answers.whole(texts.embed_sparse(data, ClientHeaders.read(request.headers)), request)

    @post(
        "/predict",
        status_code=200,
        responses=documented(list[Prediction] | list[list[Prediction]], TeiError),
        summary="Predict (TEI)",
    )
    async def predict(request: JsonRequest, data: PredictRequest) -> ASGIApp:
        """The labels of each input, the likeliest first."""
        answers.check_ready()
        return await answers.whole(texts.predict(data, ClientHeaders.read(request.headers)), request)

    @post("/similarity", status_code=200, responses=documented(list[float], TeiError), summary="Compare (TEI)")
    async def similarity(request: JsonRequest, data: SimilarityRequest) -> ASGIApp:
        """The cosine of a sentence with each of others."""
        answers.check_ready()
        return await answers.whole(texts.similarity(data, ClientHeaders.read(request.headers)), request)

    @get("/info", responses=documented(Info, TeiError), summary="Info (TEI)")
    async def info() -> ASGIApp:
        """The model's kind and the server's limits."""
        answers.check_ready()
        return json_answer(describe_model(engine, services.tasks))

    handlers: dict[int | type[Exception], Any] = {Exception: TeiErrors(errors).handle}
    return Router(
        "/", route_handlers=[embed, embed_all, embed_sparse, predict, similarity, info], exception_handlers=handlers
    )


def shared_routes(
    services: PoolingServices, texts: TextEmbeddings, answers: HttpAnswers, errors: ErrorReporter
) -> list[Any]:
    """Handlers of /rerank, which Jina's API has as well, and of POST /, which is for the model's own task."""
    tei_errors = TeiErrors(errors)

    @post(
        "/rerank",
        status_code=200,
        responses=documented(RerankResponse | list[Rank], ErrorBody | TeiError),
        opt={BODY: jina.RerankRequest | RerankRequest},
        summary="Rerank",
    )
    async def rerank(request: JsonRequest) -> ASGIApp:
        """Documents by how well they answer a query, the best first; of a body with `texts`, as Text Embeddings
        Inference answers it."""
        answers.check_ready()
        headers = ClientHeaders.read(request.headers)
        if decode_body(await request.body(), _Given).texts is UNSET:
            ranks = services.scoring.rerank(await request.read(jina.RerankRequest), headers)
            return await answers.whole(ranks, request)
        try:
            return await answers.whole(texts.rerank(await request.read(RerankRequest), headers), request)
        except Exception as error:  # in the shape that the client knows
            return tei_errors.handle(request, error).to_asgi_response(None, request)

    @post(
        "/",
        status_code=200,
        responses=documented(list[list[float]] | list[Rank] | list[Prediction] | list[list[Prediction]], TeiError),
        opt={BODY: EmbedRequest | RerankRequest | PredictRequest},
        exception_handlers={Exception: tei_errors.handle},
        summary="Own task (TEI)",
    )
    async def own_task(request: JsonRequest) -> ASGIApp:
        """As /embed, /rerank or /predict, whichever the model and the body are for."""
        answers.check_ready()
        headers = ClientHeaders.read(request.headers)
        if decode_body(await request.body(), _Given).texts is not UNSET:
            return await answers.whole(texts.rerank(await request.read(RerankRequest), headers), request)
        if services.tasks.spec.embeds:
            return await answers.whole(texts.embed(await request.read(EmbedRequest), headers), request)
        return await answers.whole(texts.predict(await request.read(PredictRequest), headers), request)

    return [rerank, own_task]


class _Given(Struct):
    """The field that distinguishes a body of Text Embeddings Inference."""

    texts: Raw | UnsetType = UNSET

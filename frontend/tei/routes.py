"""The routes of Text Embeddings Inference that no other API has."""

import asyncio
from typing import Any

from litestar import Router, get, post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from quire.frontend.http.answers import HttpAnswers, documented, json_answer
from quire.frontend.http.errors import ErrorReporter
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.pages.openapi_document import BODY
from quire.frontend.pooling.fields import MAX_INPUTS
from quire.frontend.tei.answers import Info, Prediction, Rank, SparseValue, TeiError, VertexResponse
from quire.frontend.tei.errors import TeiErrors, TooMuchError
from quire.frontend.tei.info import describe_model
from quire.frontend.tei.own_task import OwnRequest
from quire.frontend.tei.schema import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    SimilarityRequest,
    VertexRequest,
)
from quire.frontend.tei.services import TeiServices

OwnAnswer = list[list[float]] | list[list[SparseValue]] | list[Rank] | list[Prediction] | list[list[Prediction]]


def tei_routes(services: TeiServices, answers: HttpAnswers, errors: ErrorReporter) -> Router:
    """Handlers of the routes that are of this API alone."""
    handlers: dict[int | type[Exception], Any] = {Exception: TeiErrors(errors).handle}
    return Router(
        "/",
        route_handlers=[
            *_vector_routes(services, answers),
            *_label_routes(services, answers),
            *_own_task_routes(services, answers),
            *_other_routes(services, answers),
        ],
        exception_handlers=handlers,
    )


def _vector_routes(services: TeiServices, answers: HttpAnswers) -> list[Any]:
    texts = services.texts

    @post("/embed", status_code=200, responses=documented(list[list[float]], TeiError), summary="Embed (TEI)")
    async def embed(request: JsonRequest, data: EmbedRequest) -> ASGIApp:
        """A vector for each input."""
        answers.check_ready()
        call = services.call(request)
        return call.answer(await answers.result(texts.embed(data, call), request))

    @post(
        "/embed_all",
        status_code=200,
        responses=documented(list[list[list[float]]], TeiError),
        summary="Embed tokens (TEI)",
    )
    async def embed_all(request: JsonRequest, data: EmbedAllRequest) -> ASGIApp:
        """A vector for each token of each input, without pooling."""
        answers.check_ready()
        call = services.call(request)
        return call.answer(await answers.result(texts.embed_all(data, call), request))

    @post(
        "/embed_sparse",
        status_code=200,
        responses=documented(list[list[SparseValue]], TeiError),
        summary="Embed sparsely (TEI)",
    )
    async def embed_sparse(request: JsonRequest, data: EmbedSparseRequest) -> ASGIApp:
        """The elements of each input's vector that are not zero."""
        answers.check_ready()
        call = services.call(request)
        return call.answer(await answers.result(texts.embed_sparse(data, call), request))

    return [embed, embed_all, embed_sparse]


def _label_routes(services: TeiServices, answers: HttpAnswers) -> list[Any]:
    texts = services.texts

    @post(
        "/predict",
        status_code=200,
        responses=documented(list[Prediction] | list[list[Prediction]], TeiError),
        summary="Predict (TEI)",
    )
    async def predict(request: JsonRequest, data: PredictRequest) -> ASGIApp:
        """The labels of each input, the likeliest first."""
        answers.check_ready()
        call = services.call(request)
        return call.answer(await answers.result(texts.predict(data, call), request))

    @post("/similarity", status_code=200, responses=documented(list[float], TeiError), summary="Compare (TEI)")
    async def similarity(request: JsonRequest, data: SimilarityRequest) -> ASGIApp:
        """The cosine of a sentence with each of others."""
        answers.check_ready()
        call = services.call(request)
        return call.answer(await answers.result(texts.similarity(data, call), request))

    return [predict, similarity]


def _own_task_routes(services: TeiServices, answers: HttpAnswers) -> list[Any]:
    own_task = services.own_task

    @post(
        "/",
        status_code=200,
        responses=documented(OwnAnswer, TeiError),
        opt={BODY: OwnRequest},
        summary="Own task (TEI)",
    )
    async def answer(request: JsonRequest) -> ASGIApp:
        """As /embed, /embed_sparse, /rerank or /predict, whichever the model and the body are for."""
        return await own_answer(services, answers, request)

    @post("/vertex", status_code=200, responses=documented(VertexResponse, TeiError), summary="Own task (Vertex)")
    async def vertex(request: JsonRequest, data: VertexRequest) -> ASGIApp:
        """The same of many bodies, as Vertex AI sends them."""
        answers.check_ready()
        if len(data.instances) > MAX_INPUTS:
            raise TooMuchError(
                f"instances has {len(data.instances)} entries; at most {MAX_INPUTS} go.", param="instances"
            )
        bodies = [bytes(each) for each in data.instances]
        read = [request.reader.read(body, own_task.kind_of(body))[0] for body in bodies]

        async def predict() -> VertexResponse:
            work = [own_task.answer(each, services.call(request)) for each in read]
            tasks = [asyncio.create_task(each) for each in work]
            try:
                return VertexResponse(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        return await answers.whole(predict(), request)

    return [answer, vertex]


async def own_answer(services: TeiServices, answers: HttpAnswers, request: JsonRequest) -> ASGIResponse:
    """Answers a body by the model's own task."""
    answers.check_ready()
    call = services.call(request)
    data = await request.read(services.own_task.kind_of(await request.body()))
    return call.answer(await answers.result(services.own_task.answer(data, call), request))


def _other_routes(services: TeiServices, answers: HttpAnswers) -> list[Any]:
    @post("/decode", status_code=200, responses=documented(list[str], TeiError), summary="Decode (TEI)")
    async def decode(request: JsonRequest, data: DecodeRequest) -> ASGIApp:
        """The text of each list of token ids."""
        answers.check_ready()
        return await answers.whole(services.tokenizing.decode(data), request)

    @get("/info", responses=documented(Info, TeiError), summary="Info (TEI)")
    async def info() -> ASGIApp:
        """The model's kind and the server's limits."""
        answers.check_ready()
        return json_answer(describe_model(services.engine, services.pooling.tasks))

    return [decode, info]

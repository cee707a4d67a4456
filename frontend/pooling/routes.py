"""The routes of vectors, labels and scores in the forms of OpenAI's API, Jina's and vLLM's."""

from typing import Any

from litestar import post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.answers import HttpAnswers, documented, json_answer
from quire.frontend.http.invocations import Invocations
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.pooling.answers import (
    ClassificationResponse,
    EmbeddingResponse,
    PluginResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from quire.frontend.pooling.schema import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.pooling.vectors import VectorBytes


def pooling_routes(services: PoolingServices, answers: HttpAnswers, invocations: Invocations) -> list[Any]:
    """Handlers of /v1/embeddings, /pooling, /classify, /score and /v1/score, /v1/rerank and /v2/rerank.

    Args:
        invocations: gets the bodies of models that generate no text.
    """
    if services.tasks.has_any:
        _add_invocations(services, answers, invocations)

    @post(
        ["/v1/embeddings", "/embeddings"],  # the second one is Text Embeddings Inference's
        status_code=200,
        responses=documented(EmbeddingResponse),
        summary="Embed",
    )
    async def create_embedding(request: JsonRequest, data: EmbeddingRequest) -> ASGIApp:
        """A vector for each text, list of token ids or conversation.

        With `encoding_format` "bytes" the body is the vectors, and the header `metadata` is the rest, as JSON; with
        "bytes_only" there is no such header.
        """
        answers.check_ready()
        made = services.embeddings.create(data, ClientHeaders.read(request.headers))
        return vector_answer(await answers.result(made, request))

    @post("/pooling", status_code=200, responses=documented(PoolingResponse | PluginResponse), summary="Pool")
    async def create_pooling(request: JsonRequest, data: PoolingRequest) -> ASGIApp:
        """The output of any task of the model for each input; of some, a row for each token. Bytes as in
        /v1/embeddings."""
        answers.check_ready()
        made = services.pooled.create(data, ClientHeaders.read(request.headers))
        return vector_answer(await answers.result(made, request))

    @post("/classify", status_code=200, responses=documented(ClassificationResponse), summary="Classify")
    async def create_classification(request: JsonRequest, data: ClassificationRequest) -> ASGIApp:
        """The probability of each label for each input."""
        answers.check_ready()
        return await answers.whole(services.classifications.create(data, ClientHeaders.read(request.headers)), request)

    @post(["/score", "/v1/score"], status_code=200, responses=documented(ScoreResponse), summary="Score")
    async def create_score(request: JsonRequest, data: ScoreRequest) -> ASGIApp:
        """How well the texts of each pair belong together: one text and many, or as many and as many."""
        answers.check_ready()
        return await answers.whole(services.scoring.score(data, ClientHeaders.read(request.headers)), request)

    @post(["/v1/rerank", "/v2/rerank"], status_code=200, responses=documented(RerankResponse), summary="Rerank")
    async def create_ranks(request: JsonRequest, data: RerankRequest) -> ASGIApp:
        """Documents by how well they answer a query, the best first."""
        answers.check_ready()
        return await answers.whole(services.scoring.rerank(data, ClientHeaders.read(request.headers)), request)

    return [create_embedding, create_pooling, create_classification, create_score, create_ranks]


def _add_invocations(services: PoolingServices, answers: HttpAnswers, invocations: Invocations) -> None:
    """Adds the bodies of inputs, which are for the model's own task, and those of pairs."""

    async def embed(request: JsonRequest) -> ASGIApp:
        made = services.embeddings.create(await request.read(EmbeddingRequest), ClientHeaders.read(request.headers))
        return vector_answer(await answers.result(made, request))

    async def classify(request: JsonRequest) -> ASGIApp:
        made = services.classifications.create(
            await request.read(ClassificationRequest), ClientHeaders.read(request.headers)
        )
        return await answers.whole(made, request)

    async def pool(request: JsonRequest) -> ASGIApp:
        made = services.pooled.create(await request.read(PoolingRequest), ClientHeaders.read(request.headers))
        return vector_answer(await answers.result(made, request))

    async def rerank(request: JsonRequest) -> ASGIApp:
        made = services.scoring.rerank(await request.read(RerankRequest), ClientHeaders.read(request.headers))
        return await answers.whole(made, request)

    async def score(request: JsonRequest) -> ASGIApp:
        made = services.scoring.score(await request.read(ScoreRequest), ClientHeaders.read(request.headers))
        return await answers.whole(made, request)

    for field in ("input", "messages"):
        match services.tasks.asked(None):
            case "embed" | "token_embed":
                invocations.add((field,), EmbeddingRequest, EmbeddingResponse, embed)
            case "classify":
                invocations.add((field,), ClassificationRequest, ClassificationResponse, classify)
            case _:
                invocations.add((field,), PoolingRequest, PoolingResponse, pool)
    invocations.add(("data",), PoolingRequest, PoolingResponse, pool)
    invocations.add(("query", "documents"), RerankRequest, RerankResponse, rerank)
    for sides in ScoreRequest.SIDES:
        invocations.add(sides, ScoreRequest, ScoreResponse, score)


def vector_answer(made: Any) -> ASGIResponse:
    """An answer of vectors: plain bytes, or a Struct as JSON."""
    if isinstance(made, VectorBytes):
        return ASGIResponse(body=made.content, media_type="application/octet-stream", headers=made.headers)
    return json_answer(made)

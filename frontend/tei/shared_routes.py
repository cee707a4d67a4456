"""Routes that Text Embeddings Inference shares with other APIs: the fields of a body tell whose it is."""

from typing import Any

from litestar import post
from litestar.types import ASGIApp
from msgspec import UNSET, Raw, Struct, UnsetType

from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.answers import HttpAnswers, documented
from quire.frontend.http.errors import ErrorBody, ErrorReporter
from quire.frontend.http.invocations import Invocations
from quire.frontend.http.json_request import JsonRequest, decode_body
from quire.frontend.http.pages.openapi_document import BODY
from quire.frontend.openai import tokenize as vllm
from quire.frontend.openai.answers import TokenizeResponse
from quire.frontend.pooling import schema as jina
from quire.frontend.pooling.answers import RerankResponse
from quire.frontend.tei.answers import Rank, TeiError, Token
from quire.frontend.tei.errors import TeiErrors
from quire.frontend.tei.own_task import OwnRequest
from quire.frontend.tei.routes import OwnAnswer, own_answer
from quire.frontend.tei.schema import RerankRequest, TokenizeRequest
from quire.frontend.tei.services import TeiServices


class _Given(Struct):
    """Fields by which bodies of this API are told from those of others at the same route."""

    texts: Raw | UnsetType = UNSET
    inputs: Raw | UnsetType = UNSET


def shared_routes(
    services: TeiServices,
    tokenization: vllm.Tokenization,
    answers: HttpAnswers,
    errors: ErrorReporter,
    invocations: Invocations,
) -> list[Any]:
    """Handlers of /rerank, which Jina's API has as well, and of /tokenize, which vLLM's has.

    Args:
        tokenization: answers vLLM's bodies.
        invocations: gets the bodies of models that generate no text.
    """
    own_errors = TeiErrors(errors)
    if services.engine.config.pooling is not None:
        _add_invocations(invocations, services, answers, own_errors)

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
        if decode_body(await request.body(), _Given).texts is UNSET:
            headers = ClientHeaders.read(request.headers)
            ranks = services.pooling.scoring.rerank(await request.read(jina.RerankRequest), headers)
            return await answers.whole(ranks, request)
        try:
            call = services.call(request)
            data = await request.read(RerankRequest)
            return call.answer(await answers.result(services.texts.rerank(data, call), request))
        except Exception as error:  # in the shape that the client knows
            return own_errors.handle(request, error).to_asgi_response(None, request)

    @post(
        "/tokenize",
        status_code=200,
        responses=documented(TokenizeResponse | list[list[Token]], ErrorBody | TeiError),
        opt={BODY: vllm.TokenizeRequest | TokenizeRequest},
        summary="Tokenize",
    )
    async def tokenize(request: JsonRequest) -> ASGIApp:
        """Token ids of a text or a conversation; of a body with `inputs`, tokens as Text Embeddings Inference tells
        them."""
        answers.check_ready()
        if decode_body(await request.body(), _Given).inputs is UNSET:
            return await answers.whole(tokenization.tokenize(await request.read(vllm.TokenizeRequest)), request)
        try:
            data = await request.read(TokenizeRequest)
            return await answers.whole(services.tokenizing.tokenize(data), request)
        except Exception as error:
            return own_errors.handle(request, error).to_asgi_response(None, request)

    return [rerank, tokenize]


def _add_invocations(
    invocations: Invocations, services: TeiServices, answers: HttpAnswers, own_errors: TeiErrors
) -> None:
    async def invoke(request: JsonRequest) -> ASGIApp:
        try:
            return await own_answer(services, answers, request)
        except Exception as error:
            return own_errors.handle(request, error).to_asgi_response(None, request)

    invocations.add(("query", "texts"), RerankRequest, list[Rank], invoke)
    invocations.add(("inputs",), OwnRequest, OwnAnswer, invoke)

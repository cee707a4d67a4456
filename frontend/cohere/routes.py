"""The route of Cohere's embedding API."""

from typing import Any

from litestar import post
from litestar.types import ASGIApp

from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.cohere.answers import EmbedResponse
from quire.frontend.cohere.schema import EmbedRequest
from quire.frontend.cohere.service import CohereEmbeddings
from quire.frontend.http.answers import HttpAnswers, documented
from quire.frontend.http.json_request import JsonRequest


def cohere_route(embeddings: CohereEmbeddings, answers: HttpAnswers) -> Any:
    """The handler of /v2/embed; that of /v2/rerank is Jina's."""

    @post("/v2/embed", status_code=200, responses=documented(EmbedResponse), summary="Embed (Cohere)")
    async def embed(request: JsonRequest, data: EmbedRequest) -> ASGIApp:
        """A vector for each text, in each of the forms asked for."""
        answers.check_ready()
        return await answers.whole(embeddings.embed(data, ClientHeaders.read(request.headers)), request)

    return embed

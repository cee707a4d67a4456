"""POST /score and POST /rerank: how well texts belong together."""

from msgspec import UNSET

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.openai.answers import CompletionUsage
from quire.frontend.pooling.answers import (
    Ranked,
    RankedDocument,
    RerankResponse,
    RerankUsage,
    Score,
    ScoreResponse,
)
from quire.frontend.pooling.pairs import PairScores, PairScoring
from quire.frontend.pooling.replies import Reply, begin, caller_of
from quire.frontend.pooling.schema import PairsBody, RerankRequest, ScoreRequest
from quire.frontend.requests.scored_pairs import PairOptions, Sides


class Scoring:
    """Answers requests for scores and ranks."""

    def __init__(self, engine: AsyncLLM, pairs: PairScoring) -> None:
        self._engine = engine
        self._pairs = pairs

    async def score(self, request: ScoreRequest, headers: ClientHeaders = ClientHeaders()) -> ScoreResponse:
        """The score of each pair; cancelling aborts them in the engine. Raises RequestError and EngineError."""
        reply = begin(self._engine, request, headers, "score")
        found = await self._scores(request, request.sides(), reply, headers)
        return ScoreResponse(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            data=[Score(index=index, score=score) for index, score in enumerate(found.scores)],
            usage=CompletionUsage(prompt_tokens=found.num_tokens, total_tokens=found.num_tokens),
        )

    async def rerank(self, request: RerankRequest, headers: ClientHeaders = ClientHeaders()) -> RerankResponse:
        """The documents, the best first; otherwise as for `score`."""
        reply = begin(self._engine, request, headers, "score")
        sides = request.sides()
        found = await self._scores(request, sides, reply, headers)
        shown = request.return_documents is not False
        ranks = [
            Ranked(index=index, relevance_score=score, document=RankedDocument(text) if shown else UNSET)
            for index, (text, score) in enumerate(zip(sides.second, found.scores, strict=True))
        ]
        ranks.sort(key=lambda each: each.relevance_score, reverse=True)
        return RerankResponse(
            id=reply.id,
            model=reply.model,
            usage=RerankUsage(found.num_tokens, found.num_tokens),
            results=ranks[: request.top_n or None],
        )

    async def _scores(self, request: PairsBody, sides: Sides, reply: Reply, headers: ClientHeaders) -> PairScores:
        options = PairOptions(
            request.max_tokens_per_query or None,
            request.max_tokens_per_doc or None,
            request.truncation,
            request.template_variables,
            request.use_activation,
        )
        caller = caller_of(request, reply, headers)
        return await self._pairs.score(sides, options, caller)

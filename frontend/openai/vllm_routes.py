"""Routes of vLLM's API that turn tokens into answers, or return probabilities of answers."""

from typing import Any

from litestar import post
from litestar.types import ASGIApp

from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.answers import HttpAnswers, documented
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.openai.answers import ChatChunk, ChatCompletion, CompletionChunk, TextCompletion
from quire.frontend.openai.decisions.schema import (
    DecisionRequest,
    Decisions,
    SystemOneRequest,
    SystemOneResponse,
)
from quire.frontend.openai.decisions.service import Deciding
from quire.frontend.openai.derender import Derendering
from quire.frontend.openai.derender_bodies import DerenderChatRequest, DerenderCompletionRequest, DerenderedChunk
from quire.frontend.openai.generative_scoring import GenerativeScoring, ScoringRequest, ScoringResponse


def derender_routes(derendering: Derendering, answers: HttpAnswers) -> list[Any]:
    """Handlers below /v1 that turn tokens generated elsewhere into answers."""
    chat, text = ChatCompletion | DerenderedChunk[ChatChunk], TextCompletion | DerenderedChunk[CompletionChunk]

    @post("/chat/completions/derender", status_code=200, responses=documented(chat), summary="Derender a chat")
    async def derender_chat_completion(request: JsonRequest, data: DerenderChatRequest) -> ASGIApp:
        """The answer to a rendered conversation, from token ids of /inference/v1/generate: whole, or with `stream` an
        event at a time."""
        answers.check_ready()
        return await answers.whole(derendering.chat(data), request)

    @post("/completions/derender", status_code=200, responses=documented(text), summary="Derender texts")
    async def derender_completion(request: JsonRequest, data: DerenderCompletionRequest) -> ASGIApp:
        """The completions of rendered prompts, likewise."""
        answers.check_ready()
        return await answers.whole(derendering.completion(data), request)

    return [derender_chat_completion, derender_completion]


def decision_routes(deciding: Deciding, answers: HttpAnswers) -> list[Any]:
    """Handlers below /v1 that answer questions with probabilities."""

    @post("/decisions", status_code=200, responses=documented(Decisions), summary="Decide")
    async def create_decision(request: JsonRequest, data: DecisionRequest) -> ASGIApp:
        """The probability of each answer to some questions about a text, by the first token of the model's reply."""
        answers.check_ready()
        return await answers.whole(deciding.decide(data, ClientHeaders.read(request.headers)), request)

    @post("/systemone", status_code=200, responses=documented(SystemOneResponse), summary="Decide by name")
    async def create_structured_decision(request: JsonRequest, data: SystemOneRequest) -> ASGIApp:
        """As /v1/decisions, with names for the questions, about text or JSON."""
        answers.check_ready()
        return await answers.whole(deciding.system_one(data, ClientHeaders.read(request.headers)), request)

    return [create_decision, create_structured_decision]


def scoring_route(scoring: GenerativeScoring, answers: HttpAnswers) -> Any:
    """The handler of /generative_scoring."""

    @post("/generative_scoring", status_code=200, responses=documented(ScoringResponse), summary="Score items")
    async def score(request: JsonRequest, data: ScoringRequest) -> ASGIApp:
        """The probability of the first of some tokens after a query with each of several items."""
        answers.check_ready()
        return await answers.whole(scoring.score(data, ClientHeaders.read(request.headers)), request)

    return score

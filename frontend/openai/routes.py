"""The routes of OpenAI's API, and of the tokenizer beside it."""

from typing import Any

from litestar import Router, get, post
from litestar.types import ASGIApp, Guard

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http_answers import HttpAnswers, documented, json_answer
from quire.frontend.json_request import JsonRequest
from quire.frontend.openai.answers import (
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.conversation import Conversations
from quire.frontend.openai.models import ServedModels
from quire.frontend.openai.responses.routes import response_routes
from quire.frontend.openai.responses.service import Responses
from quire.frontend.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quire.frontend.openai.tokenize import Tokenization
from quire.frontend.server_config import ServerConfig
from quire.frontend.server_state import ServerState


def openai_routes(
    engine: AsyncLLM,
    server: ServerConfig,
    state: ServerState,
    answers: HttpAnswers,
    models: ServedModels,
    conversations: Conversations,
    guards: list[Guard],
) -> list[Any]:
    """Handlers for /v1 (behind `guards`) and for the tokenizer."""
    chat = ChatCompletions(engine, server, models, conversations)
    text = TextCompletions(engine, server, models)
    tokenization = Tokenization(engine, models, conversations)
    responses = Responses(engine, server, models, conversations, state)

    @post("/chat/completions", status_code=200, responses=documented(ChatCompletion), summary="Chat")
    async def create_chat_completion(request: JsonRequest, data: ChatRequest) -> ASGIApp:
        """Continues a conversation; a stream of events with `stream`."""
        answers.check_ready()
        header_id = request.headers.get("x-request-id")
        if data.stream:
            return answers.stream(chat.stream(data, header_id))
        return await answers.whole(chat.complete(data, header_id), request)

    @post("/completions", status_code=200, responses=documented(Completion), summary="Complete")
    async def create_completion(request: JsonRequest, data: CompletionRequest) -> ASGIApp:
        """Continues texts; a stream of events with `stream`."""
        answers.check_ready()
        header_id = request.headers.get("x-request-id")
        if data.stream:
            return answers.stream(text.stream(data, header_id))
        return await answers.whole(text.complete(data, header_id), request)

    @get("/models", responses=documented(ModelList), summary="Models")
    async def list_models() -> ASGIApp:
        """The names that the model goes by."""
        answers.check_ready()
        return json_answer(models.list())

    @get("/models/{name:path}", responses=documented(ModelCard), summary="Model")
    async def get_model(name: str) -> ASGIApp:
        """One of the names."""
        answers.check_ready()
        return json_answer(models.card(name.removeprefix("/")))

    @post("/tokenize", status_code=200, responses=documented(TokenizeResponse), summary="Tokenize")
    async def tokenize(request: JsonRequest, data: TokenizeRequest) -> ASGIApp:
        """Token ids of a text or a conversation."""
        answers.check_ready()
        return await answers.whole(tokenization.tokenize(data), request)

    @post("/detokenize", status_code=200, responses=documented(DetokenizeResponse), summary="Detokenize")
    async def detokenize(data: DetokenizeRequest) -> ASGIApp:
        """Text of token ids."""
        answers.check_ready()
        return json_answer(tokenization.detokenize(data))

    handlers = [create_chat_completion, create_completion, list_models, get_model]
    guarded = Router("/v1", route_handlers=[*handlers, *response_routes(responses, answers)], guards=guards)
    return [guarded, tokenize, detokenize]

"""The routes of OpenAI's API, and of the tokenizer beside it."""

from collections.abc import Coroutine
from typing import Any

import msgspec
from litestar import Router, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Guard

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.errors import ErrorBody, ErrorReporter
from quire.frontend.event_stream import EventStream
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
from quire.frontend.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quire.frontend.openai.tokenize import Tokenization
from quire.frontend.server_config import ServerConfig
from quire.frontend.server_state import ServerState

_encode = msgspec.json.Encoder().encode


def json_answer(body: Any) -> ASGIResponse:
    """A Struct as JSON, status 200."""
    return ASGIResponse(body=_encode(body), media_type="application/json")


def documented(body: Any) -> dict[int, ResponseSpec]:
    """What the API's documentation says about a route's answers."""
    return {
        200: ResponseSpec(body, description="Success", generate_examples=False),
        400: ResponseSpec(
            ErrorBody, description="The request is wrong; `param` names the field.", generate_examples=False
        ),
    }


def openai_routes(
    engine: AsyncLLM, server: ServerConfig, state: ServerState, errors: ErrorReporter, guards: list[Guard]
) -> list[Any]:
    """Handlers for /v1 (behind `guards`) and for the tokenizer."""
    models = ServedModels(engine)
    conversations = Conversations(engine, server)
    chat = ChatCompletions(engine, server, models, conversations)
    text = TextCompletions(engine, server, models)
    tokenization = Tokenization(engine, models, conversations)

    def event_stream(frames: Any) -> EventStream:
        return EventStream(frames, state, errors, keep_alive_seconds=server.sse_keep_alive_interval)

    async def finish(work: Coroutine[Any, Any, Any], request: JsonRequest) -> ASGIResponse:
        return json_answer(await state.run(work, request.receive))

    @post("/chat/completions", status_code=200, responses=documented(ChatCompletion), summary="Chat")
    async def create_chat_completion(request: JsonRequest, data: ChatRequest) -> ASGIApp:
        """Continues a conversation; a stream of events with `stream`."""
        state.check_ready()
        header_id = request.headers.get("x-request-id")
        if data.stream:
            return event_stream(chat.stream(data, header_id))
        return await finish(chat.complete(data, header_id), request)

    @post("/completions", status_code=200, responses=documented(Completion), summary="Complete")
    async def create_completion(request: JsonRequest, data: CompletionRequest) -> ASGIApp:
        """Continues texts; a stream of events with `stream`."""
        state.check_ready()
        header_id = request.headers.get("x-request-id")
        if data.stream:
            return event_stream(text.stream(data, header_id))
        return await finish(text.complete(data, header_id), request)

    @get("/models", responses=documented(ModelList), summary="Models")
    async def list_models() -> ASGIApp:
        """The names that the model goes by."""
        state.check_ready()
        return json_answer(models.list())

    @get("/models/{name:path}", responses=documented(ModelCard), summary="Model")
    async def get_model(name: str) -> ASGIApp:
        """One of the names."""
        state.check_ready()
        return json_answer(models.card(name.removeprefix("/")))

    @post("/tokenize", status_code=200, responses=documented(TokenizeResponse), summary="Tokenize")
    async def tokenize(request: JsonRequest, data: TokenizeRequest) -> ASGIApp:
        """Token ids of a text or a conversation."""
        state.check_ready()
        return await finish(tokenization.tokenize(data), request)

    @post("/detokenize", status_code=200, responses=documented(DetokenizeResponse), summary="Detokenize")
    async def detokenize(data: DetokenizeRequest) -> ASGIApp:
        """Text of token ids."""
        state.check_ready()
        return json_answer(tokenization.detokenize(data))

    guarded = Router(
        "/v1", route_handlers=[create_chat_completion, create_completion, list_models, get_model], guards=guards
    )
    return [guarded, tokenize, detokenize]

"""The routes of OpenAI's API, and those of the tokenizer."""

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

from litestar import Router, get, post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.rendered import RenderedRequest
from quire.frontend.entry_store.access import StoredEntries
from quire.frontend.http.answers import HttpAnswers, LoadReport, documented, documented_empty, json_answer
from quire.frontend.http.invocations import Invocations
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.server_state import ServerState
from quire.frontend.openai.answers import (
    ChatCompletion,
    ChatLogprobs,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TextCompletion,
)
from quire.frontend.openai.batch_chat import BatchChat, BatchChatRequest
from quire.frontend.openai.chat import ChatCompletions
from quire.frontend.openai.completions import TextCompletions
from quire.frontend.openai.decisions.service import Deciding
from quire.frontend.openai.derender import Derendering
from quire.frontend.openai.generate import TokenGeneration
from quire.frontend.openai.generative_scoring import GenerativeScoring
from quire.frontend.openai.models import ModelCards
from quire.frontend.openai.render import Rendering
from quire.frontend.openai.responses.background_responses import Makings
from quire.frontend.openai.responses.compaction import Compactions
from quire.frontend.openai.responses.conversation_routes import conversation_routes
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.jobs import Jobs
from quire.frontend.openai.responses.request_input import RequestReader
from quire.frontend.openai.responses.routes import response_routes
from quire.frontend.openai.responses.service import Responses
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.schema import ChatRequest, CompletionRequest
from quire.frontend.openai.token_bodies import AbortRequest, GenerateLogprobs, GenerateRequest, GenerateResponse
from quire.frontend.openai.tokenize import DetokenizeRequest, Tokenization
from quire.frontend.openai.vllm_routes import decision_routes, derender_routes, scoring_route

R = TypeVar("R", ChatRequest, CompletionRequest, GenerateRequest, contravariant=True)


class _Service(Protocol[R]):
    """A service that answers bodies of one type."""

    def complete(self, request: R, headers: ClientHeaders) -> Coroutine[Any, Any, Any]: ...

    def stream(self, request: R, headers: ClientHeaders) -> AsyncGenerator[bytes, None]: ...


class ModelDescriptions(Protocol):
    """The served model, in the form that the clients of one API read."""

    def list(self) -> Any: ...

    def card(self, name: str) -> Any: ...


def openai_routes(
    engine: AsyncLLM,
    server: ServerConfig,
    state: ServerState,
    answers: HttpAnswers,
    conversations: Conversations,
    anthropic_models: ModelDescriptions,
    entries: StoredEntries,
    invocations: Invocations,
    *,
    num_owners: int,
) -> list[Any]:
    """Handlers for /v1, /detokenize and /inference; that of /tokenize is shared with another API.

    Args:
        entries: the stored responses and conversations.
        num_owners: API keys that share them.
        anthropic_models: the answers of /v1/models to clients of Anthropic's API.
        invocations: gets the bodies of models that generate.
    """
    chat = ChatCompletions(engine, server, conversations)
    text = TextCompletions(engine, server, conversations)
    rendering = Rendering(engine, conversations, text)
    derendering = Derendering(engine, conversations, chat, text)
    load = LoadReport(engine)
    handlers = [
        *_chat_routes(chat, rendering, answers, load),
        *_completion_routes(text, rendering, answers, load),
        *derender_routes(derendering, answers),
        *decision_routes(Deciding(engine, conversations), answers),
        *_model_routes(ModelCards(engine), anthropic_models, answers),
        *_response_routes(engine, server, state, answers, conversations, entries, num_owners),
    ]
    if engine.config.pooling is None:
        _add_invocations(invocations, chat, text, answers, load)
    tokenization = Tokenization(engine, conversations)
    return [
        Router("/v1", route_handlers=handlers),
        *_generate_routes(TokenGeneration(engine, server, conversations), answers),
        scoring_route(GenerativeScoring(engine), answers),
        _detokenize_route(tokenization, answers),
        *([_tokenizer_info_route(tokenization, server, answers)] if server.enable_tokenizer_info_endpoint else []),
    ]


def _chat_routes(chat: ChatCompletions, rendering: Rendering, answers: HttpAnswers, load: LoadReport) -> list[Any]:
    batch = BatchChat(chat)

    @post("/chat/completions", status_code=200, responses=documented(ChatCompletion), summary="Chat")
    async def create_chat_completion(request: JsonRequest, data: ChatRequest) -> ASGIApp:
        """Continues a conversation; a stream of events with `stream`.

        With the header `endpoint-load-metrics-format: TEXT` or `JSON`, a whole answer has the engine's load in the
        header `endpoint-load-metrics`.
        """
        answers.check_ready()
        return await _continue(chat, data, request, answers, load)

    @post("/chat/completions/batch", status_code=200, responses=documented(ChatCompletion), summary="Chats")
    async def create_chat_completions(request: JsonRequest, data: BatchChatRequest) -> ASGIApp:
        """Continues many conversations, one choice for each."""
        answers.check_ready()
        return await answers.whole(batch.complete(data, ClientHeaders.read(request.headers)), request)

    @post("/chat/completions/render", status_code=200, responses=documented(RenderedRequest), summary="Render a chat")
    async def render_chat_completion(request: JsonRequest, data: ChatRequest) -> ASGIApp:
        """Token ids and sampling parameters of a conversation; nothing is generated."""
        answers.check_ready()
        return await answers.whole(rendering.chat(data, ClientHeaders.read(request.headers)), request)

    return [create_chat_completion, create_chat_completions, render_chat_completion]


def _completion_routes(
    text: TextCompletions, rendering: Rendering, answers: HttpAnswers, load: LoadReport
) -> list[Any]:
    @post("/completions", status_code=200, responses=documented(TextCompletion), summary="Complete")
    async def create_completion(request: JsonRequest, data: CompletionRequest) -> ASGIApp:
        """Continues texts; a stream of events with `stream`.

        With the header `endpoint-load-metrics-format: TEXT` or `JSON`, a whole answer has the engine's load in the
        header `endpoint-load-metrics`.
        """
        answers.check_ready()
        return await _continue(text, data, request, answers, load)

    @post("/completions/render", status_code=200, responses=documented(list[RenderedRequest]), summary="Render texts")
    async def render_completion(request: JsonRequest, data: CompletionRequest) -> ASGIApp:
        """Token ids and sampling parameters of each prompt; nothing is generated."""
        answers.check_ready()
        return await answers.whole(rendering.completion(data, ClientHeaders.read(request.headers)), request)

    return [create_completion, render_completion]


def _model_routes(
    openai_models: ModelDescriptions, anthropic_models: ModelDescriptions, answers: HttpAnswers
) -> list[Any]:
    def models(request: JsonRequest) -> ModelDescriptions:
        return anthropic_models if "anthropic-version" in request.headers else openai_models

    @get("/models", responses=documented(ModelList), summary="Models")
    async def list_models(request: JsonRequest) -> ASGIApp:
        """The model's names; in Anthropic's form with an `anthropic-version` header."""
        answers.check_ready()
        return json_answer(models(request).list())

    @get("/models/{name:path}", responses=documented(ModelCard), summary="Model")
    async def get_model(request: JsonRequest, name: str) -> ASGIApp:
        """One of the names; in Anthropic's form with an `anthropic-version` header."""
        answers.check_ready()
        return json_answer(models(request).card(name.removeprefix("/")))

    return [list_models, get_model]


def _response_routes(
    engine: AsyncLLM,
    server: ServerConfig,
    state: ServerState,
    answers: HttpAnswers,
    conversations: Conversations,
    entries: StoredEntries,
    num_owners: int,
) -> list[Any]:
    """Handlers for stored responses and conversations, which share one store."""
    makings = Makings()
    store = ResponseStore(
        entries,
        makings,
        max_entries=server.max_stored_responses,
        max_bytes=server.max_stored_response_bytes,
        num_owners=num_owners,
    )
    reader, kept = RequestReader(store), KeptConversations(store)
    jobs = Jobs(engine, store, makings, kept, state, tokens_as_ids=server.return_tokens_as_token_ids)
    responses = Responses(engine, conversations, store, reader, jobs)
    return [
        *response_routes(responses, Compactions(engine, conversations, reader), answers),
        *conversation_routes(kept, answers),
    ]


def _detokenize_route(tokenization: Tokenization, answers: HttpAnswers) -> Any:
    @post("/detokenize", status_code=200, responses=documented(DetokenizeResponse), summary="Detokenize")
    async def detokenize(request: JsonRequest, data: DetokenizeRequest) -> ASGIApp:
        """Text of token ids."""
        answers.check_ready()
        return await answers.whole(tokenization.detokenize(data), request)

    return detokenize


def _tokenizer_info_route(tokenization: Tokenization, server: ServerConfig, answers: HttpAnswers) -> Any:
    info = tokenization.info(server.read_chat_template())

    @get("/tokenizer_info", responses=documented(dict[str, Any]), summary="Tokenizer info")
    async def tokenizer_info() -> ASGIApp:
        """The tokenizer's configuration, as in tokenizer_config.json."""
        answers.check_ready()
        return json_answer(info)

    return tokenizer_info


def _add_invocations(
    invocations: Invocations, chat: ChatCompletions, text: TextCompletions, answers: HttpAnswers, load: LoadReport
) -> None:
    async def invoke_chat(request: JsonRequest) -> ASGIApp:
        return await _continue(chat, await request.read(ChatRequest), request, answers, load)

    async def invoke_text(request: JsonRequest) -> ASGIApp:
        return await _continue(text, await request.read(CompletionRequest), request, answers, load)

    invocations.add(("messages",), ChatRequest, ChatCompletion, invoke_chat)
    invocations.add(("prompt",), CompletionRequest, TextCompletion, invoke_text)


def _generate_routes(service: TokenGeneration, answers: HttpAnswers) -> list[Any]:
    answer = GenerateResponse[GenerateLogprobs] | GenerateResponse[ChatLogprobs]

    @post("/inference/v1/generate", status_code=200, responses=documented(answer), summary="Generate tokens")
    async def generate(request: JsonRequest, data: GenerateRequest) -> ASGIApp:
        """Continues token ids with token ids, as /render makes them of a conversation; events with `stream`."""
        answers.check_ready()
        return await _continue(service, data, request, answers)

    @post(
        "/inference/v1/abort_requests",
        status_code=200,
        responses={**documented(None), **documented_empty()},
        summary="Abort requests",
    )
    async def abort(data: AbortRequest) -> ASGIApp:
        """Ends requests of any route by the ids of their answers; unknown ids are ignored."""
        answers.check_ready()
        service.abort(data)
        return ASGIResponse(body=b"")

    return [generate, abort]


async def _continue(
    service: _Service[R], data: R, request: JsonRequest, answers: HttpAnswers, load: LoadReport | None = None
) -> ASGIApp:
    """The service's answer to a body, whole or as a stream, as the body asks; `load` goes with whole ones."""
    headers = ClientHeaders.read(request.headers)
    if data.stream:
        return answers.stream(service.stream(data, headers))
    return await answers.whole(service.complete(data, headers), request, load)

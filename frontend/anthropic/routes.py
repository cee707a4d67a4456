"""The routes of Anthropic's Messages API."""

from typing import Any

from litestar import Router, post
from litestar.types import ASGIApp

from quire.frontend.anthropic.answers import ErrorAnswer, MessageAnswer, TokenCount
from quire.frontend.anthropic.errors import PING, AnthropicErrors, error_frame
from quire.frontend.anthropic.schema import CountTokensRequest, MessagesRequest
from quire.frontend.anthropic.service import Messages
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.rendered import RenderedRequest
from quire.frontend.http.answers import HttpAnswers, documented
from quire.frontend.http.errors import ErrorReporter
from quire.frontend.http.json_request import JsonRequest


def anthropic_routes(messages: Messages, answers: HttpAnswers, errors: ErrorReporter) -> Router:
    """Handlers for /v1/messages."""

    @post("/", status_code=200, responses=documented(MessageAnswer, ErrorAnswer), summary="Message")
    async def create_message(request: JsonRequest, data: MessagesRequest) -> ASGIApp:
        """Continues a conversation; a stream of events with `stream`."""
        answers.check_ready()
        headers = ClientHeaders.read(request.headers)
        if data.stream:
            return answers.stream(messages.stream(data, headers), error_frame, PING)
        return await answers.whole(messages.create(data, headers), request)

    @post("/count_tokens", status_code=200, responses=documented(TokenCount, ErrorAnswer), summary="Count tokens")
    async def count_tokens(request: JsonRequest, data: CountTokensRequest) -> ASGIApp:
        """Counts the tokens of a conversation."""
        answers.check_ready()
        return await answers.whole(messages.count_tokens(data), request)

    @post("/render", status_code=200, responses=documented(RenderedRequest, ErrorAnswer), summary="Render a message")
    async def render_message(request: JsonRequest, data: MessagesRequest) -> ASGIApp:
        """Token ids and sampling parameters of a conversation; nothing is generated."""
        answers.check_ready()
        return await answers.whole(messages.render(data, ClientHeaders.read(request.headers)), request)

    handlers: dict[int | type[Exception], Any] = {Exception: AnthropicErrors(errors).handle}
    return Router(
        "/v1/messages", route_handlers=[create_message, count_tokens, render_message], exception_handlers=handlers
    )

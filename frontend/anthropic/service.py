"""Answers messages, and counts the tokens of their prompts."""

import uuid
from collections.abc import AsyncGenerator

from quire.frontend.anthropic.answers import MessageAnswer, MessageUsage, TokenCount
from quire.frontend.anthropic.builder import MessageBuilder
from quire.frontend.anthropic.schema import NAMES, CountTokensRequest, MessagesRequest
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.turn import Turn
from quire.frontend.http.event_stream import ACCEPTED
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.openai.models import ServedModels
from quire.frontend.openai.renaming import renamed
from quire.frontend.openai.schema import ChatRequest

CALL_PREFIX = "toolu_"
"""How ids of calls begin."""


class Messages:
    """Answers the routes of the Messages API; needs no HTTP."""

    def __init__(self, server: ServerConfig, models: ServedModels, conversations: Conversations) -> None:
        self._models = models
        self._conversations = conversations
        self._tells_cached = server.enable_prompt_tokens_details

    async def create(self, request: MessagesRequest) -> MessageAnswer:
        """The whole message; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        turn, builder = await self._open(request)
        try:
            async for _, events in turn.events():
                builder.add(events)
        finally:
            turn.close()
        return builder.message

    async def stream(self, request: MessagesRequest) -> AsyncGenerator[bytes, None]:
        """The message as events; closing the generator aborts it in the engine. Errors as for `create`."""
        turn, builder = await self._open(request)
        started = False
        try:
            yield ACCEPTED
            async for _, events in turn.events():
                frames = [] if started else builder.start()
                started = True
                frames += builder.add(events)
                if frames:
                    yield b"".join(frames)
            yield b"".join(builder.end())
        finally:
            turn.close()

    async def count_tokens(self, request: CountTokensRequest) -> TokenCount:
        """Tokens of the prompt. Raises RequestError."""
        chat = self._translate(request)
        with renamed(**NAMES):
            return TokenCount(len((await self._conversations.render(chat)).token_ids))

    def _translate(self, request: CountTokensRequest) -> ChatRequest:
        self._models.check(request.model)
        with renamed(**NAMES):
            chat = request.to_chat()
            chat.check()
        return chat

    async def _open(self, request: MessagesRequest) -> tuple[Turn, MessageBuilder]:
        message_id = f"msg_{uuid.uuid4().hex}"
        chat = self._translate(request)
        with renamed(**NAMES):
            turn = await self._conversations.open(chat, message_id, call_prefix=CALL_PREFIX)
        usage = MessageUsage(input_tokens=turn.num_prompt_tokens, output_tokens=0)
        message = MessageAnswer(id=message_id, model=self._models.name, usage=usage)
        return turn, MessageBuilder(message, tells_cached=self._tells_cached)

"""Answers messages, and counts the tokens of their prompts."""

import uuid
from collections.abc import AsyncGenerator

import msgspec

from quire.core.errors import ParameterError
from quire.frontend.anthropic.answers import ContextManagement, MessageAnswer, MessageUsage, TokenCount
from quire.frontend.anthropic.builder import MessageBuilder
from quire.frontend.anthropic.content import with_one_system_message
from quire.frontend.anthropic.schema import NAMES, CountTokensRequest, MessagesRequest
from quire.frontend.chat.answer_events import Turn
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.chat.conversation import Conversations
from quire.frontend.chat.renaming import renamed
from quire.frontend.chat.rendered import RenderedRequest
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.http.event_stream import Accepted
from quire.frontend.requests.prompt import Prompt


class Messages:
    """Answers the routes of the Messages API; needs no HTTP."""

    def __init__(self, model: ServedModel, conversations: Conversations) -> None:
        self._model = model
        self._conversations = conversations

    async def create(self, request: MessagesRequest, headers: ClientHeaders = ClientHeaders()) -> MessageAnswer:
        """The whole message; cancelling aborts it in the engine.

        Raises:
            RequestError: the request cannot be served as asked.
            EngineError: the engine failed.
        """
        turn, builder = await self._open(request, headers)
        try:
            async for _, events in turn.events():
                builder.add(events)
        finally:
            turn.close()
        return builder.message

    async def stream(
        self, request: MessagesRequest, headers: ClientHeaders = ClientHeaders()
    ) -> AsyncGenerator[bytes, None]:
        """The message as events; closing the generator aborts it in the engine. Errors as for `create`."""
        turn, builder = await self._open(request, headers)
        try:
            yield Accepted(b"".join(builder.start()))
            async for _, events in turn.events():
                if frames := builder.add(events):
                    yield b"".join(frames)
            yield b"".join(builder.end())
        finally:
            turn.close()

    async def count_tokens(self, request: CountTokensRequest) -> TokenCount:
        """Tokens of the prompt. Raises RequestError."""
        _, prompt = await self._render(self._read(request))
        return TokenCount(len(prompt.token_ids), ContextManagement(len(prompt.token_ids)))

    async def render(self, request: MessagesRequest, headers: ClientHeaders = ClientHeaders()) -> RenderedRequest:
        """The message as a body of /inference/v1/generate. Raises RequestError."""
        chat, prompt = await self._render(self._read(request))
        return await self._conversations.rendered(chat, prompt, f"chatcmpl-{headers.choose_id(None)}")

    def _read(self, request: CountTokensRequest) -> ChatInput:
        if not request.model:
            raise ParameterError("model must name a model that is served.", param="model")
        self._model.choose(request.model)
        request.check()
        with renamed(**NAMES):
            return request.to_chat_input()

    async def _render(self, chat: ChatInput) -> tuple[ChatInput, Prompt]:
        """The conversation and its prompt. If the template rejects it, all system messages are joined first."""
        try:
            return chat, await self._conversations.render(chat)
        except ParameterError:
            messages = with_one_system_message(chat.messages)
            if messages == chat.messages:
                raise
        chat = msgspec.structs.replace(chat, messages=messages)
        return chat, await self._conversations.render(chat)

    async def _open(self, request: MessagesRequest, headers: ClientHeaders) -> tuple[Turn, MessageBuilder]:
        message_id = f"msg_{uuid.uuid4().hex}"
        self._conversations.check_generates()
        chat, prompt = await self._render(self._read(request))
        turn = await self._conversations.open(chat, message_id, headers, prompt=prompt)
        usage = MessageUsage(input_tokens=turn.num_prompt_tokens, output_tokens=0)
        message = MessageAnswer(id=message_id, model=self._model.chosen_name, usage=usage)
        return turn, MessageBuilder(message)

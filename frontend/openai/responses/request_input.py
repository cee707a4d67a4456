"""Reads a request together with the stored items that come before its input."""

from typing import Any

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.chat.chat_input import ChatInput
from quire.frontend.openai.responses.items import input_items, to_messages
from quire.frontend.openai.responses.schema import ResponsesRequest
from quire.frontend.openai.responses.store import ResponseStore
from quire.frontend.openai.responses.tools import OfferedTools


class ReadRequest(Struct, frozen=True, kw_only=True):
    """A request, its conversation and its tools."""

    previous: list[dict[str, Any]]  # items that the client did not send with this request
    items: list[dict[str, Any]]  # the request's own input
    chat: ChatInput
    tools: OfferedTools


class RequestReader:
    """Reads requests.

    Args:
        store: has earlier responses and conversations.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def read(self, request: ResponsesRequest) -> ReadRequest:
        """The request's conversation and tools.

        Raises:
            NotFoundError: it continues a response or conversation that the server does not have.
            ParameterError: a field that is malformed or contradicts another, some by their names in chat completions.
        """
        previous, items = await self._previous(request), list(input_items(request.input))
        tools = OfferedTools(request.tools)
        messages = to_messages(previous + items, request.instructions, num_previous=len(previous))
        return ReadRequest(previous=previous, items=items, chat=request.to_chat_input(messages, tools), tools=tools)

    async def _previous(self, request: ResponsesRequest) -> list[dict[str, Any]]:
        if request.conversation_id is not None:
            return (await self._store.conversation(request.conversation_id, param="conversation")).items
        if request.previous_response_id is None:
            return []
        stored = await self._store.response(request.previous_response_id, param="previous_response_id")
        if stored.response.status not in ("completed", "incomplete"):
            raise ParameterError(
                f"The previous response is {stored.response.status}; a conversation goes on from one that is "
                "completed or incomplete.",
                param="previous_response_id",
            )
        return stored.items

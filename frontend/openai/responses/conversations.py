"""Conversations that the server stores, so that clients need not send their items again."""

import contextlib
import time
import uuid
from typing import Any

from quire.core.errors import NotFoundError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.chat.renaming import renamed
from quire.frontend.openai.responses.answers import Conversation, DeletedConversation
from quire.frontend.openai.responses.bodies import ConversationRequest, ConversationUpdate, ItemsRequest
from quire.frontend.openai.responses.item_page import ItemPage, item_page, page_of, with_unique_ids
from quire.frontend.openai.responses.items import to_messages
from quire.frontend.openai.responses.schema import check_metadata
from quire.frontend.openai.responses.store import ResponseStore, no_room
from quire.frontend.openai.responses.stored import StoredConversation

logger = get_logger(__name__)

MAX_ITEMS = 20
"""Items that one call may add, as OpenAI's documentation has it."""


class KeptConversations:
    """Answers the routes below /v1/conversations, and adds the input and output of responses.

    Methods raise NotFoundError for a conversation or item that does not exist.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(self, request: ConversationRequest) -> Conversation:
        """A new conversation.

        Raises:
            ParameterError: a wrong field, or a server that keeps nothing.
            OverloadedError: responses that are being made take all room.
        """
        if not self._store.keeps_any:
            raise ParameterError("Conversations need a server with --max-stored-responses above 0.")
        await self._store.check_room()
        check_metadata(request.metadata)
        conversation = Conversation(
            id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=request.metadata or {}
        )
        entry = StoredConversation(
            conversation=conversation, items=with_unique_ids(_checked(request.items or []))
        ).entry()
        self._store.check_size(entry, param="items")
        if not await self._store.put_new(entry):
            raise no_room("no conversation is created")
        return conversation

    async def retrieve(self, conversation_id: str) -> Conversation:
        """A conversation, without its items."""
        return (await self._store.conversation(conversation_id)).conversation

    async def update(self, conversation_id: str, request: ConversationUpdate) -> Conversation:
        """Replaces the metadata. Raises ParameterError."""
        check_metadata(request.metadata)

        def update(stored: StoredConversation) -> StoredConversation:
            stored.conversation.metadata = request.metadata or {}
            return stored

        return (await self._store.change(conversation_id, update, too_large="metadata")).conversation

    async def delete(self, conversation_id: str) -> DeletedConversation:
        """Forgets a conversation. Responses that belong to it stay."""
        await self._store.conversation(conversation_id)
        await self._store.delete(conversation_id)
        return DeletedConversation(id=conversation_id)

    async def add(self, conversation_id: str, request: ItemsRequest) -> ItemPage:
        """Adds items at the end, and returns them with their ids. Raises ParameterError."""
        given = _checked(request.items)
        items: list[dict[str, Any]] = []

        def add(stored: StoredConversation) -> StoredConversation:
            items[:] = with_unique_ids(given, (item["id"] for item in stored.items))
            stored.items += items
            return stored

        await self._store.change(conversation_id, add, too_large="items")
        return page_of(items)

    async def items(self, conversation_id: str, *, limit: int, after: str | None, newest_first: bool) -> ItemPage:
        """One page of the items. Raises ParameterError."""
        items = (await self._store.conversation(conversation_id)).items
        return item_page(items, limit=limit, after=after, newest_first=newest_first)

    async def item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """One item."""
        return _find(await self._store.conversation(conversation_id), item_id)

    async def delete_item(self, conversation_id: str, item_id: str) -> Conversation:
        """Removes one item."""

        def remove(stored: StoredConversation) -> StoredConversation:
            stored.items.remove(_find(stored, item_id))
            return stored

        return (await self._store.change(conversation_id, remove, too_large="items")).conversation

    async def extend(self, conversation_id: str, items: list[dict[str, Any]]) -> None:
        """Adds a response's input and output. Drops a conversation that becomes too large; ignores a deleted one."""

        def extend(stored: StoredConversation) -> StoredConversation:
            stored.items += with_unique_ids(items, (item["id"] for item in stored.items))
            return stored

        with contextlib.suppress(NotFoundError):
            if await self._store.change(conversation_id, extend) is None:
                logger.warning(
                    "%s is dropped: with its last answer it does not fit into --max-stored-response-bytes",
                    conversation_id,
                )


def _checked(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of one call, once a prompt can be made of them. Raises ParameterError."""
    if len(items) > MAX_ITEMS:
        raise ParameterError(
            f"items may have {MAX_ITEMS} entries, got {len(items)}; add the others by further calls.", param="items"
        )
    with renamed(input="items"):
        to_messages(items)
    return items


def _find(stored: StoredConversation, item_id: str) -> dict[str, Any]:
    for item in stored.items:
        if item["id"] == item_id:
            return item
    raise NotFoundError(f"The conversation has no item {item_id!r}.", param="item_id")

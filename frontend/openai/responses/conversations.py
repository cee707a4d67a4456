"""Conversations that the server keeps, so that clients need not send their items again."""

import time
import uuid
from typing import Any

import msgspec

from quire.core.errors import NotFoundError, ParameterError
from quire.core.logging import get_logger
from quire.frontend.chat.renaming import renamed
from quire.frontend.openai.responses.answers import Conversation, DeletedConversation
from quire.frontend.openai.responses.bodies import ConversationRequest, ConversationUpdate, ItemsRequest
from quire.frontend.openai.responses.item_page import ItemPage, item_page, page_of, told_apart
from quire.frontend.openai.responses.items import to_messages
from quire.frontend.openai.responses.schema import check_metadata
from quire.frontend.openai.responses.store import ResponseStore, StoredConversation

logger = get_logger(__name__)

MAX_ITEMS = 20
"""Items that one call may add, as OpenAI's documentation has it."""


class KeptConversations:
    """Answers the routes below /v1/conversations, and adds what responses answered.

    Methods raise NotFoundError for a conversation or item that is not there.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def create(self, request: ConversationRequest) -> Conversation:
        """A new conversation.

        Raises:
            ParameterError: a wrong field, or a server that keeps nothing.
            OverloadedError: responses that are being made take all room.
        """
        if not self._store.keeps_any:
            raise ParameterError("Conversations need a server with --max-stored-responses above 0.")
        self._store.check_room()
        check_metadata(request.metadata)
        conversation = Conversation(
            id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=request.metadata or {}
        )
        self._put(conversation, told_apart(_checked(request.items or [])))
        return conversation

    def retrieve(self, conversation_id: str) -> Conversation:
        """A conversation, without its items."""
        return self._store.conversation(conversation_id).conversation

    def update(self, conversation_id: str, request: ConversationUpdate) -> Conversation:
        """Replaces the metadata. Raises ParameterError."""
        stored = self._store.conversation(conversation_id)
        check_metadata(request.metadata)
        changed = msgspec.structs.replace(stored.conversation, metadata=request.metadata or {})
        self._put(changed, stored.items)
        return changed

    def delete(self, conversation_id: str) -> DeletedConversation:
        """Forgets a conversation. Responses that belong to it stay."""
        self._store.delete(self._store.conversation(conversation_id))
        return DeletedConversation(id=conversation_id)

    def add(self, conversation_id: str, request: ItemsRequest) -> ItemPage:
        """Adds items at the end, and tells them with their ids. Raises ParameterError."""
        stored = self._store.conversation(conversation_id)
        items = told_apart(_checked(request.items), (item["id"] for item in stored.items))
        self._put(stored.conversation, stored.items + items)
        return page_of(items)

    def items(self, conversation_id: str, *, limit: int, after: str | None, newest_first: bool) -> ItemPage:
        """One page of the items. Raises ParameterError."""
        items = self._store.conversation(conversation_id).items
        return item_page(items, limit=limit, after=after, newest_first=newest_first)

    def item(self, conversation_id: str, item_id: str) -> dict[str, Any]:
        """One item."""
        return _find(self._store.conversation(conversation_id), item_id)

    def delete_item(self, conversation_id: str, item_id: str) -> Conversation:
        """Removes one item."""
        stored = self._store.conversation(conversation_id)
        found = _find(stored, item_id)
        self._put(stored.conversation, [item for item in stored.items if item is not found])
        return stored.conversation

    def extend(self, conversation_id: str, items: list[dict[str, Any]]) -> None:
        """Adds a response's input and output. A conversation that becomes too large by it, or is gone, is not kept."""
        try:
            stored = self._store.conversation(conversation_id)
        except NotFoundError:
            return
        told = told_apart(items, (item["id"] for item in stored.items))
        if not self._store.put(StoredConversation(stored.conversation, stored.items + told)):
            logger.warning(
                "%s is dropped: it is larger than --max-stored-response-bytes with its last answer", conversation_id
            )

    def _put(self, conversation: Conversation, items: list[dict[str, Any]]) -> None:
        stored = StoredConversation(conversation, items)
        self._store.check_size(stored, param="items")
        self._store.put(stored)


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

"""Responses and conversations in their stored form."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from quire.frontend.entry_store.store import Entry
from quire.frontend.openai.responses.answers import Conversation, Response, ResponseFailure

LOST = ResponseFailure("server_error", "The server's process that made this response has ended. Ask again.")


class StoredResponse(Struct, kw_only=True):
    """One response, and the conversation up to its end.

    Attributes:
        items: the conversation's items; they include the response's own once it is finished.
        num_input_items: the number of items before the response's own.
    """

    response: Response
    items: list[dict[str, Any]]
    num_input_items: int

    def entry(self, version: int, *, events: Sequence[bytes] | None = None, maker: int | None = None) -> Entry:
        """The response as an entry of the store."""
        frames = None if events is None else list(events)
        return Entry(id=self.response.id, body=_encode(self), events=frames, maker=maker, version=version)


class StoredConversation(Struct, kw_only=True):
    """One conversation. The ids of its items are unique."""

    conversation: Conversation
    items: list[dict[str, Any]]

    def entry(self) -> Entry:
        """The conversation as an entry of the store, with a new version."""
        return Entry(id=self.conversation.id, body=_encode(self), version=new_version())


def new_version() -> int:
    """A number that no other entry with the same id has."""
    return secrets.randbits(62)


_encode = msgspec.json.Encoder().encode
_read_response = msgspec.json.Decoder(StoredResponse).decode
_read_conversation = msgspec.json.Decoder(StoredConversation).decode


def response_of(entry: Entry) -> StoredResponse:
    """The response in an entry; one whose maker has ended has failed."""
    stored = _read_response(entry.body)
    if entry.is_lost:
        stored.response.status, stored.response.error = "failed", LOST
    return stored


def conversation_of(entry: Entry) -> StoredConversation:
    """The conversation in an entry."""
    return _read_conversation(entry.body)


def is_conversation(entry_id: str) -> bool:
    """True for the id of a conversation. Clients may choose ids of responses, which all begin with `resp_`."""
    return entry_id.startswith("conv_")

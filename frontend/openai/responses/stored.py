"""Responses and conversations in the form in which they are kept."""

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
        items: the conversation's; with the response's own, once it is finished.
        num_input_items: those that were there before the response.
    """

    response: Response
    items: list[dict[str, Any]]
    num_input_items: int

    def entry(self, version: int, *, events: Sequence[bytes] | None = None, maker: int | None = None) -> Entry:
        """The response as it is kept; see `Entry`."""
        frames = None if events is None else list(events)
        return Entry(id=self.response.id, body=_encode(self), events=frames, maker=maker, version=version)


class StoredConversation(Struct, kw_only=True):
    """One conversation. Each item has an id of its own."""

    conversation: Conversation
    items: list[dict[str, Any]]

    def entry(self) -> Entry:
        """The conversation as it is kept, in another version than any before."""
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
    """Whether an id is a conversation's; clients may choose responses' ids, and these begin with `resp_`."""
    return entry_id.startswith("conv_")

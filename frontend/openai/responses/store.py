"""Responses and conversations that are stored between requests, for all servers of the command."""

from collections.abc import Callable
from typing import overload

import msgspec

from quire.core.errors import EngineError, NotFoundError, OverloadedError, ParameterError
from quire.frontend.entry_store.access import Abandon, Cancel, Events, Look, MakerQuestion, ReadEvents, StoredEntries
from quire.frontend.entry_store.store import Entry
from quire.frontend.keys.caller import current_owner
from quire.frontend.openai.responses.answers import Response
from quire.frontend.openai.responses.background_responses import Makings
from quire.frontend.openai.responses.stored import (
    StoredConversation,
    StoredResponse,
    conversation_of,
    is_conversation,
    response_of,
)

Change = Callable[[StoredConversation], StoredConversation]

_read_response = msgspec.json.Decoder(Response).decode
_read_events = msgspec.msgpack.Decoder(Events).decode


class ResponseStore:
    """Finds and changes responses and conversations by id, at any server of the command: those of the caller's key.

    Args:
        makings: the responses that this server is making.
        max_entries, max_bytes: the bounds of `EntryStore`, to refuse entries that it would not keep.
        num_owners: keys that share it.
    """

    def __init__(
        self, entries: StoredEntries, makings: Makings, *, max_entries: int, max_bytes: int, num_owners: int = 1
    ) -> None:
        self._entries = entries
        self._makings = makings
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_in_making = max_entries // num_owners or min(1, max_entries)
        entries.answer_with(makings.answer)

    @property
    def server(self) -> int:
        """The number of this server, as `Entry.maker`."""
        return self._entries.server

    @property
    def keeps_any(self) -> bool:
        """True if this server stores responses."""
        return self._max_entries > 0

    # -------------------------------------------------------------------------------------------------------- both

    async def put(self, entry: Entry, *, replaces: int) -> None:
        """Stores the next version of an entry, unless the entry is no longer at version `replaces`."""
        await self._entries.put(_own(entry), replaces=replaces)

    async def put_new(self, entry: Entry) -> bool:
        """Stores an entry with a new id. Returns False if it is too large, or finds no room.

        Raises:
            ParameterError: another server has taken the id since `check_new`.
        """
        put = await self._entries.put(_own(entry), replaces="nothing")
        if put == "changed":
            raise _taken(entry.id)
        return put == "kept"

    async def delete(self, entry_id: str) -> None:
        """Forgets an entry, and ends a response that is still being made."""

        entry = await self._entries.find(entry_id, current_owner())
        await self._entries.remove(entry_id, current_owner())
        if entry is not None and entry.maker is not None:
            await self._ask(entry.maker, Abandon(entry.version))

    async def check_room(self) -> None:
        """Raises OverloadedError when responses that are still being made take all room of the caller."""
        running = await self._entries.num_in_making_of(current_owner())
        if running >= self._max_in_making:
            raise OverloadedError(
                f"{running} responses are being made in the background, which is all that this server keeps at once; "
                "wait for one, or raise --max-stored-responses.",
                retry_after_seconds=5,
            )

    # --------------------------------------------------------------------------------------------------- responses

    async def response(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """A response as it is now.

        Raises:
            NotFoundError: the response was never stored, or is gone.
        """
        entry, answer = await self._ask_maker(response_id, Look, param)
        stored = response_of(entry)
        return stored if answer is None else msgspec.structs.replace(stored, response=_read_response(answer))

    async def cancel(self, response_id: str) -> Response:
        """Ends the making of a response that is still being made; returns the response as it is then.

        Raises:
            NotFoundError: the response was never stored, or is gone.
        """
        entry, answer = await self._ask_maker(response_id, Cancel)
        return response_of(entry).response if answer is None else _read_response(answer)

    async def events(self, response_id: str, start: int) -> Events:
        """The events of a response from number `start` on, once there are some.

        Raises:
            NotFoundError: the response was never stored, or is gone.
            ParameterError: its events are not kept.
            EngineError: they are lost, because the server's process that made it has ended.
        """
        entry, answer = await self._ask_maker(response_id, lambda version: ReadEvents(version, start))
        if answer is not None:
            return _read_events(answer)
        if entry.is_lost and entry.events is not None:
            raise EngineError("The server's process that made this response has ended, and its events are lost.")
        if entry.events is None:
            raise ParameterError(
                "Only responses created with background=true and stream=true can be streamed again; leave stream out.",
                param="stream",
            )
        return Events(entry.events[start:], ended=True)

    async def check_new(self, response_id: str) -> None:
        """Raises ParameterError when the id is taken."""
        if await self._entries.find(response_id, current_owner()) is not None:
            raise _taken(response_id)

    # ----------------------------------------------------------------------------------------------- conversations

    async def conversation(self, conversation_id: str, *, param: str = "conversation_id") -> StoredConversation:
        """A conversation.

        Raises:
            NotFoundError: there never was such a conversation, or it is gone.
        """
        return conversation_of(await self._conversation_entry(conversation_id, param))

    @overload
    async def change(self, conversation_id: str, change: Change, *, too_large: str) -> StoredConversation: ...

    @overload
    async def change(self, conversation_id: str, change: Change) -> StoredConversation | None: ...

    async def change(
        self, conversation_id: str, change: Change, *, too_large: str | None = None
    ) -> StoredConversation | None:
        """Replaces a conversation by the result of `change`, which is called again if another request came first.

        Args:
            too_large: the field to name if the conversation would be too large. None drops the conversation if it
                cannot be kept.

        Returns:
            The conversation as it is now; None if it was dropped.

        Raises:
            NotFoundError: there never was such a conversation, or it is gone.
            ParameterError: it would be too large.
            OverloadedError: responses that are being made leave it no room, and it is dropped.
        """
        while True:
            before = await self._conversation_entry(conversation_id, "conversation_id")
            changed = change(conversation_of(before))
            entry = changed.entry()
            if too_large is not None:
                self.check_size(entry, param=too_large)
            put = await self._entries.put(_own(entry), replaces=before.version)
            if put == "no room" and too_large is not None:
                raise no_room("the conversation is gone")
            if put != "changed":
                return changed if put == "kept" else None

    def check_size(self, entry: Entry, *, param: str) -> None:
        """Raises ParameterError when an entry is too large to be kept."""
        if len(entry.body) > self._max_bytes:
            raise ParameterError(
                f"{param} would make this take {len(entry.body)} bytes, and the server keeps "
                f"{self._max_bytes}: send less, or raise --max-stored-response-bytes.",
                param=param,
            )

    # ----------------------------------------------------------------------------------------------------- helpers

    async def _ask_maker(
        self, response_id: str, question: Callable[[int], MakerQuestion], param: str = "response_id"
    ) -> tuple[Entry, bytes | None]:
        """A response's entry, and its maker's answer; None if the response is finished.

        Args:
            question: makes the question about the entry of a version.
        """
        entry = await self._response_entry(response_id, param)
        if entry.maker is None:
            return entry, None
        answer = await self._ask(entry.maker, question(entry.version))
        if answer is None:  # it was finished in between, or its maker has ended
            entry = await self._response_entry(response_id, param)
        return entry, answer

    async def _ask(self, maker: int, question: MakerQuestion) -> bytes | None:
        if maker == self._entries.server:
            return await self._makings.answer(question)
        return await self._entries.ask(maker, question)

    async def _response_entry(self, response_id: str, param: str) -> Entry:
        entry = None if is_conversation(response_id) else await self._entries.find(response_id, current_owner())
        if entry is None:
            raise _missing("response", response_id, param)
        return entry

    async def _conversation_entry(self, conversation_id: str, param: str) -> Entry:
        owner = current_owner()
        entry = await self._entries.find(conversation_id, owner) if is_conversation(conversation_id) else None
        if entry is None:
            raise _missing("conversation", conversation_id, param)
        return entry


def _own(entry: Entry) -> Entry:
    """The entry as one of the caller's."""
    return msgspec.structs.replace(entry, owner=current_owner())


def no_room(consequence: str) -> OverloadedError:
    """The error for a store whose bytes are all taken by responses in the making."""
    return OverloadedError(
        f"Responses that are being made in the background leave no room, and {consequence}; wait for them, or raise "
        "--max-stored-responses or --max-stored-response-bytes.",
        retry_after_seconds=5,
    )


def _taken(response_id: str) -> ParameterError:
    return ParameterError(
        f"request_id {response_id!r} is taken by a stored response: choose another one, or leave it out.",
        param="request_id",
    )


def _missing(what: str, entry_id: str, param: str) -> NotFoundError:
    return NotFoundError(
        f"There is no {what} {entry_id!r}: it was not stored, the server was restarted, or it has made room for newer "
        "ones (--max-stored-responses, --max-stored-response-bytes, --max-stored-response-seconds).",
        param=param,
    )

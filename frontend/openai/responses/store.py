"""What the server keeps between requests, within bounds: responses and conversations."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from quire.core.errors import NotFoundError, OverloadedError, ParameterError
from quire.frontend.openai.responses.answers import Conversation, Response

_encode = msgspec.json.Encoder().encode


class StreamHistory:
    """The frames of a stream that needs no reader: any number of readers may follow it, from any frame on."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()
        self.num_bytes = 0

    def add(self, frames: list[bytes]) -> None:
        """Appends frames; the position of a frame is its sequence number."""
        self._frames += frames
        self.num_bytes += sum(map(len, frames))
        self._tell()

    def end(self) -> None:
        """Ends the stream: no more frames come."""
        self._ended = True
        self._tell()

    async def follow(self, start: int = 0) -> AsyncGenerator[list[bytes], None]:
        """Frames from number `start` on, as they come; frames that are there already come in one list."""
        while True:
            news = self._news
            if frames := self._frames[start:]:
                start += len(frames)
                yield frames
            if self._ended and start >= len(self._frames):
                return
            if news is self._news:
                await news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Stored:
    """What the store keeps under an id."""

    def __init__(self, entry_id: str) -> None:
        self.id = entry_id
        self.stored_at = 0.0
        self.num_bytes = 0

    @property
    def is_running(self) -> bool:
        """Whether it is still being made."""
        return False

    def stop(self) -> None:
        """Ends what still makes it."""

    def measure(self) -> int:
        """Rough size in memory, in bytes."""
        raise NotImplementedError


class StoredResponse(Stored):
    """One response, the conversation up to its end, and the task that makes it in the background.

    Args:
        items: the conversation's items; with the response's own, once it is finished.
        history: the stream of a response made in the background with `stream`.
    """

    def __init__(self, response: Response, items: list[dict[str, Any]], history: StreamHistory | None = None) -> None:
        super().__init__(response.id)
        self.response = response
        self.items = items
        self.num_input_items = len(items)
        self.history = history
        self.task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the response is still being made."""
        return self.task is not None and not self.task.done()

    def stop(self) -> None:
        """Cancels the task that makes the response."""
        if self.task is not None:
            self.task.cancel()

    def measure(self) -> int:
        """Rough size of the response in memory, in bytes."""
        kept = self.history.num_bytes if self.history is not None else 0
        return len(_encode(self.response)) + len(_encode(self.items)) + kept


class StoredConversation(Stored):
    """One conversation.

    Args:
        items: each with an id of its own. A list that is in here is replaced when items come or go, never changed.
    """

    def __init__(self, conversation: Conversation, items: list[dict[str, Any]]) -> None:
        super().__init__(conversation.id)
        self.conversation = conversation
        self.items = items

    def measure(self) -> int:
        """Rough size of the conversation in memory, in bytes."""
        return len(_encode(self.conversation)) + len(_encode(self.items))


class ResponseStore:
    """Keeps responses and conversations by id; those that were stored or changed last, longest.

    Args:
        max_responses: most responses and conversations kept; 0 keeps none.
        max_bytes: most bytes of all of them together.
        max_age_seconds: how long one is kept after its last change.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        max_age_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._stored: dict[str, Stored] = {}  # the oldest first
        self._num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether this server stores responses at all."""
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._stored

    def put(self, stored: Stored) -> bool:
        """Keeps a new or changed entry. Old ones make room for it. False for one that is too large, and not kept."""
        self._remove(stored.id)
        stored.stored_at = self._clock()
        stored.num_bytes = stored.measure()
        if stored.num_bytes > self._max_bytes and not stored.is_running:
            return False
        self._stored[stored.id] = stored
        self._num_bytes += stored.num_bytes
        self._make_room()
        return True

    def check_size(self, stored: Stored, *, param: str) -> None:
        """Raises ParameterError when an entry is too large to be kept."""
        num_bytes = stored.measure()
        if num_bytes > self._max_bytes:
            raise ParameterError(
                f"{param} would make this take {num_bytes} bytes, and the server keeps {self._max_bytes}: send less, "
                "or raise --max-stored-response-bytes.",
                param=param,
            )

    def check_room(self) -> None:
        """Raises OverloadedError when responses that are still being made take all room."""
        running = sum(1 for each in self._stored.values() if each.is_running)
        if running >= self._max_responses:
            raise OverloadedError(
                f"{running} responses are being made in the background, which is all that this server keeps; "
                "wait for one, or raise --max-stored-responses.",
                retry_after_seconds=5,
            )

    def response(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """A response.

        Raises:
            NotFoundError: the response was never stored, or is gone.
        """
        self._drop_old()
        stored = self._stored.get(response_id)
        if not isinstance(stored, StoredResponse):
            raise _missing("response", response_id, param)
        return stored

    def conversation(self, conversation_id: str, *, param: str = "conversation_id") -> StoredConversation:
        """A conversation.

        Raises:
            NotFoundError: there never was such a conversation, or it is gone.
        """
        self._drop_old()
        stored = self._stored.get(conversation_id)
        if not isinstance(stored, StoredConversation):
            raise _missing("conversation", conversation_id, param)
        return stored

    def delete(self, stored: Stored) -> None:
        """Forgets an entry, and ends a response that is still being made."""
        stored.stop()
        self._remove(stored.id)

    def check_new(self, response_id: str) -> None:
        """Raises ParameterError when the id is taken."""
        if response_id in self._stored:
            raise ParameterError(f"request_id {response_id!r} is taken by a stored response.", param="request_id")

    def _make_room(self) -> None:
        self._drop_old()
        for entry_id, stored in list(self._stored.items()):
            if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            if not stored.is_running:
                self._remove(entry_id)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._max_age_seconds
        for entry_id, stored in list(self._stored.items()):
            if stored.stored_at > oldest:
                return
            if not stored.is_running:
                self._remove(entry_id)

    def _remove(self, entry_id: str) -> None:
        stored = self._stored.pop(entry_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes


def _missing(what: str, entry_id: str, param: str) -> NotFoundError:
    return NotFoundError(
        f"There is no {what} {entry_id!r}: it was not stored, the server was restarted, or it has made room for newer "
        "ones (--max-stored-responses, --max-stored-response-bytes, --max-stored-response-seconds).",
        param=param,
    )

"""Responses that the server keeps: for `previous_response_id`, for reading them again, and while they are made."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from quire.core.errors import NotFoundError, OverloadedError, ParameterError
from quire.frontend.openai.responses.answers import Response

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


class StoredResponse:
    """One response, the conversation up to its end, and the task that makes it in the background.

    Args:
        items: the conversation's items; with the response's own, once it is finished.
        history: the stream of a response made in the background with `stream`.
    """

    def __init__(self, response: Response, items: list[dict[str, Any]], history: StreamHistory | None = None) -> None:
        self.response = response
        self.items = items
        self.num_input_items = len(items)
        self.history = history
        self.task: asyncio.Task[None] | None = None
        self.stored_at = 0.0
        self.num_bytes = 0

    @property
    def is_running(self) -> bool:
        """Whether the response is still being made."""
        return self.task is not None and not self.task.done()

    def measure(self) -> int:
        """Rough size of the response in memory, in bytes."""
        kept = self.history.num_bytes if self.history is not None else 0
        return len(_encode(self.response)) + len(_encode(self.items)) + kept


class ResponseStore:
    """Keeps responses by id, the newest longest.

    Args:
        max_responses: most responses kept; 0 keeps none.
        max_bytes: most bytes of all responses together.
        max_age_seconds: how long a response is kept.
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
        self._stored: dict[str, StoredResponse] = {}  # the oldest first
        self._num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether this server stores responses at all."""
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: StoredResponse) -> None:
        """Keeps a new or changed response. Old ones make room for it; one that is too large is not kept."""
        self._remove(stored.response.id)
        stored.stored_at = self._clock()
        stored.num_bytes = stored.measure()
        if stored.num_bytes > self._max_bytes and not stored.is_running:
            return
        self._stored[stored.response.id] = stored
        self._num_bytes += stored.num_bytes
        self._make_room()

    def check_room(self) -> None:
        """Raises OverloadedError when responses that are still being made take all room."""
        running = sum(1 for each in self._stored.values() if each.is_running)
        if running >= self._max_responses:
            raise OverloadedError(
                f"{running} responses are being made in the background, which is all that this server keeps; "
                "wait for one, or raise --max-stored-responses.",
                retry_after_seconds=5,
            )

    def get(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """The response.

        Raises:
            NotFoundError: the response was never stored, or is gone.
        """
        self._drop_old()
        stored = self._stored.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"There is no response {response_id!r}: it was not stored, or has made room for newer ones "
                "(--max-stored-responses, --max-stored-response-bytes, --max-stored-response-seconds).",
                param=param,
            )
        return stored

    def delete(self, response_id: str) -> None:
        """Forgets a response, and ends one that is still being made. Raises NotFoundError."""
        stored = self.get(response_id)
        if stored.task is not None:
            stored.task.cancel()
        self._remove(response_id)

    def check_new(self, response_id: str) -> None:
        """Raises ParameterError when the id is taken."""
        if response_id in self._stored:
            raise ParameterError(f"request_id {response_id!r} is taken by a stored response.", param="request_id")

    def _make_room(self) -> None:
        self._drop_old()
        for response_id, stored in list(self._stored.items()):
            if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                return
            if not stored.is_running:
                self._remove(response_id)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._max_age_seconds
        for response_id, stored in list(self._stored.items()):
            if stored.stored_at > oldest:
                return
            if not stored.is_running:
                self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes

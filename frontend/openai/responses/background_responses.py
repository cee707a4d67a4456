"""The responses that this server makes in the background, and answers about their progress."""

import asyncio
from typing import assert_never

import msgspec
from msgspec import Struct

from quire.frontend.entry_store.access import Abandon, Cancel, Look, MakerQuestion, ReadEvents
from quire.frontend.openai.responses.answers import Response
from quire.frontend.openai.responses.unread_events import StreamHistory

_encode_json = msgspec.json.Encoder().encode
_encode = msgspec.msgpack.Encoder().encode


class Making(Struct):
    """A response that is being made.

    Attributes:
        response: as it is now.
        history: its stream; None if it has none.
        task: makes it.
    """

    response: Response
    history: StreamHistory | None
    task: asyncio.Task[None]


class Makings:
    """Answers questions about the responses that are being made here."""

    def __init__(self) -> None:
        self._by_version: dict[int, Making] = {}

    def add(self, version: int, making: Making) -> None:
        """Adds a response that is being made, by the version of its entry, until its task ends."""
        self._by_version[version] = making
        making.task.add_done_callback(lambda _: self._by_version.pop(version))

    async def answer(self, question: MakerQuestion) -> bytes | None:
        """The answer to a question: a response as JSON, or `Events` as MessagePack; None without such a response."""
        making = self._by_version.get(question.version)
        if making is None:
            return None
        match question:
            case Look():
                return _encode_json(making.response)
            case ReadEvents():
                return None if making.history is None else _encode(await making.history.read(question.start))
            case Cancel():
                if making.response.status in ("queued", "in_progress"):
                    making.response.status = "cancelled"
                    making.task.cancel()
                    await asyncio.wait([making.task])
                return _encode_json(making.response)
            case Abandon():
                making.task.cancel()
                return b""
            case _:
                assert_never(question)

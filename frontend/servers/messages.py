"""What the parent of several API servers and each of them say to each other, and the socket that carries it."""

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.engine.visit import EngineAddress
from quire.core.wire.protocol import EngineReady
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.servers.family import Family


class ServerStart(Struct, array_like=True, tag="start"):
    """The first message to an API server."""

    number: int
    args: EngineArgs
    config: EngineConfig
    folder: str  # of the checkpoint
    tokenizer_folder: str
    server: ServerConfig
    announces: bool  # logs what is served, because no other server has
    greets: bool
    import_path: list[str]  # the parent's, for the user's own modules
    known: list[EngineReady]  # what each engine can do, once all have started


class EngineStarted(Struct, array_like=True, tag="engine_started"):
    """An engine is ready."""

    number: int
    engine: EngineAddress


class EngineEnded(Struct, array_like=True, tag="engine_ended"):
    """That engine has ended; another may follow."""

    number: int
    lost_peer: str | None = None  # the reason, if the engine ended because of another one


class EngineWaits(Struct, array_like=True, tag="engine_waits"):
    """What the next engine with a number waits for; None: for nothing any more."""

    number: int
    waits_for: str | None


class EngineGone(Struct, array_like=True, tag="engine_gone"):
    """No engine with this number follows."""

    number: int
    reason: str


class TakeSnapshot(Struct, array_like=True, tag="take_snapshot"):
    """Answer with a `Snapshot` of this number."""

    scrape_id: int


class Page(Struct, array_like=True, tag="page"):
    """The answer to `AskPage`: what /metrics shows."""

    page_id: int
    text: bytes


ToServer = ServerStart | EngineStarted | EngineEnded | EngineWaits | EngineGone | TakeSnapshot | Page


class Serving(Struct, array_like=True, tag="serving"):
    """The server takes connections."""


class Snapshot(Struct, array_like=True, tag="snapshot"):
    """The metrics of one server. Sent now and then (0), and when asked for."""

    scrape_id: int
    families: list[Family]


class AskPage(Struct, array_like=True, tag="ask_page"):
    """Somebody reads /metrics at one server; answered with `Page`."""

    page_id: int


FromServer = Serving | Snapshot | AskPage

M = TypeVar("M")


class ControlLink(Generic[M]):
    """One end of a stream socket, from which messages of the type M come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> "ControlLink[M]":
        """The link over a connected Unix socket; `kind` is M."""
        return cls(*await asyncio.open_unix_connection(sock=end), kind)

    def send(self, message: ToServer | FromServer) -> None:
        """Queues a message; it is lost if the other process is gone."""
        payload = self._encoder.encode(message)
        self._writer.write(len(payload).to_bytes(4, "little") + payload)

    async def receive(self) -> M | None:
        """The next message; None when the other process has ended."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Closes the socket."""
        self._writer.close()

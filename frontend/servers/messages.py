"""Messages between the parent of several API servers and each of them, and the socket that carries them."""

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.engine.borrowed_engine import EngineReport
from quire.core.wire.protocol import EngineReady
from quire.frontend.entry_store.access import MakerQuestion
from quire.frontend.entry_store.store import Entry, Replaces
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.keys.caller import Quantity
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
    num_servers: int = 1
    item_folder: str = ""  # of processed images, videos and sounds that all servers share; empty: each has its own


class TakeSnapshot(Struct, array_like=True, tag="take_snapshot"):
    """Answer with a `Snapshot` of this number."""

    scrape_id: int


class ReadPage(Struct, array_like=True, tag="read_page"):
    """Asks for the bytes of /metrics."""


class FindEntry(Struct, array_like=True, tag="find_entry"):
    """Asks for `EntryStore.find`."""

    entry_id: str
    owner: str = ""


class PutEntry(Struct, array_like=True, tag="put_entry"):
    """Asks for `EntryStore.put`."""

    entry: Entry
    replaces: Replaces


class RemoveEntry(Struct, array_like=True, tag="remove_entry"):
    """Asks for `EntryStore.remove`."""

    entry_id: str
    owner: str = ""


class CountInMaking(Struct, array_like=True, tag="count_in_making"):
    """Asks for `EntryStore.num_in_making_of`."""

    owner: str


class TakeLimit(Struct, array_like=True, tag="take_limit"):
    """Asks for `RateLimits.take_now`, of all servers' keys."""

    name: str
    quantity: Quantity
    amount: int
    limit: int


class AskMaker(Struct, array_like=True, tag="ask_maker"):
    """Asks another server; answered as that one answers, or with None if it has ended."""

    maker: int
    question: MakerQuestion


class AskedOfParent(Struct, array_like=True, tag="asked_of_parent"):
    """A server's question to the parent; answered with `Answer`."""

    call_id: int
    question: ReadPage | FindEntry | PutEntry | RemoveEntry | CountInMaking | TakeLimit | AskMaker


class AskedOfServer(Struct, array_like=True, tag="asked_of_server"):
    """Another server's question, passed on by the parent; answered with `Answer`."""

    call_id: int
    question: MakerQuestion


class Placed(Struct, array_like=True, tag="placed"):
    """Prompts that a server has sent to engines, for all other servers: (engine, names of blocks as 64-bit integers)
    each."""

    prompts: list[tuple[int, bytes]]


class Answer(Struct, array_like=True, tag="answer"):
    """The answer to a call, of a type that follows from the question."""

    call_id: int
    value: msgspec.Raw

    @classmethod
    def of(cls, call_id: int, value: Any) -> "Answer":
        """The answer with a value, which MessagePack can hold."""
        return cls(call_id, msgspec.Raw(_encode(value)))


_encode = msgspec.msgpack.Encoder().encode

ToServer = ServerStart | EngineReport | TakeSnapshot | AskedOfServer | Answer | Placed


class Serving(Struct, array_like=True, tag="serving"):
    """The server takes connections."""


class Snapshot(Struct, array_like=True, tag="snapshot"):
    """The metrics of one server. Sent at intervals (0), and on request."""

    scrape_id: int
    families: list[Family]


class CountUse(Struct, array_like=True, tag="count_use"):
    """Asks for `RateLimits.add`, and no answer."""

    name: str
    quantity: Quantity
    amount: int


FromServer = Serving | Snapshot | AskedOfParent | Answer | Placed | CountUse

BEHIND_BYTES = 1 << 20

M = TypeVar("M")


class ControlLink(Generic[M]):
    """One end of a stream socket that delivers messages of the type M."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> "ControlLink[M]":
        """The link over a connected Unix socket; `kind` is M."""
        return cls(*await asyncio.open_unix_connection(sock=end), kind)

    @property
    def is_behind(self) -> bool:
        """True if the other process has left much unread, as one that hangs does."""
        return self._writer.transport.get_write_buffer_size() > BEHIND_BYTES

    def send(self, message: ToServer | FromServer) -> None:
        """Queues a message; it is lost if the other process is gone."""
        if self._writer.is_closing():  # uvloop raises where asyncio warns
            return
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

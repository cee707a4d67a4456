"""Main of one of several API servers: `python -m quire.frontend.servers.api_server`, started by `ServerGroup`."""

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from quire.core.engine.borrowed_engine import BorrowingLauncher, EngineReport
from quire.core.engine.launcher import NoMoreEnginesError
from quire.core.errors import UnavailableError
from quire.core.logging import configure, get_logger
from quire.core.processes import leave
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.connections.signals import exit_soon
from quire.frontend.http.server import HttpServer
from quire.frontend.http.tally import Holdings
from quire.frontend.launch.setup import EngineSetup
from quire.frontend.servers.calls import Calls, LinkEndedError
from quire.frontend.servers.family import Family
from quire.frontend.servers.messages import (
    Answer,
    AskedOfParent,
    AskedOfServer,
    ControlLink,
    Placed,
    ReadPage,
    ServerStart,
    Serving,
    Snapshot,
    TakeSnapshot,
    ToServer,
)
from quire.frontend.servers.shared_entries import SharedEntries
from quire.frontend.servers.shared_limits import SharedLimits
from quire.frontend.servers.shared_routing import PlacedPrompts, blocks_of

logger = get_logger(__name__)

SNAPSHOT_SECONDS = 1.0
"""The interval between snapshots of the metrics. A killed server loses the counts of up to this time."""


def main() -> None:
    """Serves until the parent ends, or a signal comes. Arguments: descriptors of the control socket,
    of the port, and of the memory of what all servers hold."""
    control, listener = (socket.socket(fileno=int(each)) for each in sys.argv[1:3])
    uvloop.run(_run(control, listener, int(sys.argv[3])))
    leave(0)


async def _run(control: socket.socket, listener: socket.socket, memory: int) -> None:
    control.setblocking(False)
    link: ControlLink[ToServer] = await ControlLink.open(control, ToServer)
    start = await link.receive()
    if not isinstance(start, ServerStart):
        return  # the parent has ended
    sys.path += [each for each in start.import_path if each not in sys.path]
    configure(f"serve-{start.number}", start.config.logging, hints=False)
    with contextlib.suppress(NoMoreEnginesError):  # the parent, which keeps the engines, says why
        holdings = Holdings.shared(memory, start.num_servers, start.number)
        await ApiServer(link, start, listener, holdings).run()
    exit_soon()


class SharedPage:
    """The metrics page of all servers, whose counts the parent knows."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def text(self) -> bytes:
        try:
            text: bytes = await self._calls.ask(ReadPage(), bytes)
        except LinkEndedError:
            raise UnavailableError("The server is shutting down.", retry_after_seconds=5) from None
        return text


class ApiServer:
    """One HTTP server whose engines, port and metrics are its parent's."""

    def __init__(
        self, link: ControlLink[ToServer], start: ServerStart, listener: socket.socket, holdings: Holdings
    ) -> None:
        self._link = link
        self._borrowed = [BorrowingLauncher() for _ in start.config.served_engines]
        setup = EngineSetup(start.args, Path(start.folder), Path(start.tokenizer_folder), start.config, [])
        server = start.server
        self._engine = engine = AsyncLLM.from_setup(
            setup,
            borrowed=self._borrowed,
            known=start.known,
            on_placed=PlacedPrompts(link.send).add,
            item_folder=start.item_folder,
            max_log_len=server.max_log_len,
            log_outputs=server.enable_log_outputs,
            log_deltas=server.enable_log_deltas,
        )
        self._registry = CollectorRegistry()
        self._calls = Calls(lambda call_id, question: link.send(AskedOfParent(call_id, question)))
        self._entries = SharedEntries(start.number, self._calls)
        self._answering: set[asyncio.Task[None]] = set()
        self._http = HttpServer(
            engine,
            server,
            listener,
            greet=start.greets,
            announces=start.announces,
            registry=self._registry,
            page=SharedPage(self._calls),
            entries=self._entries,
            limits=SharedLimits(self._calls, link.send),
            holdings=holdings,
        )

    async def run(self) -> None:
        """Serves until the HTTP server stops."""
        self._link.send(Serving())
        tasks = [asyncio.create_task(each) for each in (self._listen(), self._send_snapshots())]
        try:
            await self._http.run()
        finally:
            self._link.send(self._snapshot(0))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._link.close()

    async def _listen(self) -> None:
        try:
            while (message := await self._link.receive()) is not None:
                self._on_message(message)
        except Exception:
            logger.exception("shutting down: a message of the parent could not be handled")
        finally:
            self._calls.end()
            self._http.stop_at_once()  # the engines end with the parent

    def _on_message(self, message: ToServer) -> None:
        match message:
            case EngineReport():
                self._borrowed[message.number].on_report(message)
            case TakeSnapshot():
                self._link.send(self._snapshot(message.scrape_id))
            case AskedOfServer():
                task = asyncio.create_task(self._answer(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Answer():
                self._calls.on_answer(message)
            case Placed():
                for number, names in message.prompts:
                    self._engine.client.on_placed_elsewhere(number, blocks_of(names))

    async def _answer(self, asked: AskedOfServer) -> None:
        self._link.send(Answer.of(asked.call_id, await self._entries.answer(asked.question)))

    async def _send_snapshots(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            self._link.send(self._snapshot(0))

    def _snapshot(self, scrape_id: int) -> Snapshot:
        return Snapshot(scrape_id, [Family.of(each) for each in self._registry.collect()])


if __name__ == "__main__":
    main()

"""The parent of several API servers: keeps engines and servers running, and merges their metrics."""

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec.structs import replace
from prometheus_client import disable_created_metrics
from prometheus_client.core import Metric

from quire.core import envs
from quire.core.engine.borrowed_engine import EngineReport
from quire.core.engine.engine_handle import EngineHandle
from quire.core.engine.engine_life import EngineMessage
from quire.core.engine.failures import fault_of
from quire.core.engine.fleet import Fleet
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import EngineDeadError, QuireError
from quire.core.logging import get_logger
from quire.core.wire.protocol import EngineReady, Heartbeat, SchedulerStats, StepOutputs
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.http.connections.signals import signal_handlers
from quire.frontend.http.connections.uvicorn_config import GRACE_SECONDS
from quire.frontend.http.server_config import ServerConfig
from quire.frontend.http.service.metrics_page import cache_facts
from quire.frontend.http.tally import Holdings, memory_of_holdings
from quire.frontend.keys.rate_limits import RateLimits
from quire.frontend.launch.setup import EngineSetup
from quire.frontend.media.shared_items import ItemFolder
from quire.frontend.metrics.engine_statistics import EngineStatistics
from quire.frontend.metrics.families import Labelled
from quire.frontend.metrics.stats_log import StatsLog
from quire.frontend.servers.calls import Calls
from quire.frontend.servers.messages import (
    Answer,
    AskedOfParent,
    CountUse,
    Placed,
    ServerStart,
    Serving,
    Snapshot,
    TakeSnapshot,
    ToServer,
)
from quire.frontend.servers.parent_answers import ParentAnswers
from quire.frontend.servers.server_process import ServerProcess
from quire.frontend.servers.shared_entries import SharedStore
from quire.frontend.servers.shared_metrics import SharedMetrics

logger = get_logger(__name__)

LOOK_SECONDS = 0.5
"""The interval at which the group checks what engines wait for."""
KILL_SECONDS = 5.0
"""Time after its grace period in which a stopping server must have ended."""


class ServerGroup:
    """Runs several API servers on one port until a signal comes.

    Args:
        listener: the port, which all servers accept connections from.
        greet: have one server print how to talk to it.
    """

    def __init__(
        self, num_servers: int, setup: EngineSetup, server: ServerConfig, listener: socket.socket, *, greet: bool
    ) -> None:
        self._num_servers = num_servers
        disable_created_metrics()
        self._setup = setup
        self._config = server
        self._listener = listener
        self._greet = greet
        # All servers have one key of hashes, so that their routers give prompts the same names: see `prompt_blocks`.
        self._hash_seed = {"PYTHONHASHSEED": str(1 + secrets.randbelow(2**32 - 1))}
        model_name = ServedModel.from_args(setup.args, setup.folder).name
        max_adapters = setup.config.limits.max_adapters
        self._statistics = [
            EngineStatistics(Labelled(model_name, engine), max_adapters=max_adapters)
            for engine in setup.config.served_engines
        ]
        self._fleet = Fleet(setup.launchers, self, coupled=setup.config.layout.shares_experts, restarts=setup.restarts)
        for statistics, engine in zip(self._statistics, self._fleet.engines, strict=True):
            statistics.status = engine.status
        self._loads = [SchedulerStats() for _ in setup.launchers]  # as each engine last reported
        self._reports = [EngineReport(number) for number, _ in enumerate(setup.launchers)]
        self._servers: dict[int, ServerProcess] = {}
        self._metrics = SharedMetrics(self._ask, self._own_families)
        self._known: list[EngineReady] = []  # what each engine can do, once all have started
        self._announced = False
        self._stopping = asyncio.Event()
        self._all_gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shared = SharedStore(server.entry_store(), self._calls_to)
        self._limits = RateLimits()
        self._answers = ParentAnswers(self._shared, self._metrics, self._limits)
        self._memory = memory_of_holdings(num_servers)
        self._items = ItemFolder() if setup.args.multimodal.shares_items else None

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then lets the servers drain and closes the engines. Servers get SIGHUP, too.

        Raises:
            ConfigError: the model cannot be loaded.
            EngineDeadError: all engines are gone for good, or the servers do not start.
        """
        reads_keys = self._config.api_key_file is not None
        with signal_handlers(self._stop, partial(self._signal, signal.SIGHUP) if reads_keys else None):
            work = [self._keep_engines(), self._look(), *(self._keep_server(each) for each in range(self._num_servers))]
            tasks = [asyncio.create_task(each) for each in (self._stopping.wait(), *work)]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                if not self._stopping.is_set():  # else they have the signal, and another would cut requests short
                    self._stop()
                await self._end(tasks)

    # ---------------------------------------------------------------------------------------------------------- engines

    async def _keep_engines(self) -> None:
        """Runs the engines. Never returns; raises when all engines are gone."""
        self._known = await self._fleet.start()
        logging_stats = None
        if self._setup.config.log_stats:
            log = StatsLog(self._statistics, aggregate=self._setup.config.aggregate_engine_logging)
            logging_stats = asyncio.create_task(log.run())
        try:
            await self._all_gone
        finally:
            if logging_stats is not None:
                logging_stats.cancel()

    async def _look(self) -> None:
        """Reports to the servers what engines wait for, which they cannot ask the engines. Never returns."""
        while True:
            for engine in self._fleet.engines:
                self._report(engine, waits_for=engine.status().waits_for)
            await asyncio.sleep(LOOK_SECONDS)

    def _report(self, of: EngineHandle, **changes: Any) -> None:
        """Reports changes of an engine's state to the servers."""
        before = self._reports[of.number]
        if (report := replace(before, **changes)) != before:
            self._reports[of.number] = report
            self._broadcast(report)

    def has_work(self, engine: EngineHandle) -> bool:
        load = self._loads[engine.number]
        return load.num_running + load.num_waiting > 0

    def on_ready(self, engine: EngineHandle, ready: EngineReady) -> None:
        self._statistics[engine.number].cache_info = cache_facts(self._setup.config, ready)
        self._report(engine, engine=engine.address)

    def on_message(self, engine: EngineHandle, message: EngineMessage) -> None:
        if isinstance(message, StepOutputs | Heartbeat):
            self._loads[engine.number] = message.stats
            self._statistics[engine.number].on_stats(message.stats)

    def on_crash(self, engine: EngineHandle, end: QuireError) -> None:
        self._loads[engine.number] = SchedulerStats()
        self._report(engine, engine=None, end=str(end), fault=fault_of(end))

    def on_dead(self, engine: EngineHandle, error: QuireError) -> None:
        self._report(engine, engine=None, end=str(error), fault="own", is_gone=True)
        if not self._fleet.is_dead:
            self._fleet.give_up_with(error)
        elif not self._all_gone.done() and not self._stopping.is_set():
            if envs.read_flag("KEEP_ALIVE_ON_ENGINE_DEATH"):
                logger.error("the engines are gone; every request is answered 503: %s", error)
            else:
                self._all_gone.set_exception(EngineDeadError(f"The engines are gone: {error}"))

    # ---------------------------------------------------------------------------------------------------------- servers

    async def _keep_server(self, number: int) -> None:
        """Runs one server after another with the same number. Returns when the group stops."""
        restarts = RestartPolicy()
        while not self._stopping.is_set():
            server = self._servers[number] = await self._launch(number)
            if self._stopping.is_set():  # the signal came while it was launched
                server.process.send_signal(signal.SIGTERM)
            try:
                await self._listen(number, server)
                code = await server.process.wait()
            finally:
                del self._servers[number]
                self._shared.on_server_ended(number)
                for tally in Holdings.shared(self._memory, self._num_servers, number):
                    tally.clear()
                server.calls.end()
                self._metrics.on_ended(number)
                server.link.close()
            if self._stopping.is_set():
                return
            seconds = None if server.serving_since is None else time.monotonic() - server.serving_since
            restarts.add(ready_seconds=seconds, had_work=False, had_output=False)
            if (why := restarts.why_hopeless) is not None:
                raise EngineDeadError(f"API server {number} ended with exit code {code}. {why}")
            logger.error(
                "API server %d ended with exit code %d. It is started again in %.1f s; its requests are aborted.",
                *(number, code, restarts.pause_seconds),
            )
            await asyncio.sleep(restarts.pause_seconds)

    async def _launch(self, number: int) -> ServerProcess:
        setup, announces = self._setup, number == 0 and not self._announced
        start = ServerStart(
            *(number, setup.args, setup.config, str(setup.folder), str(setup.tokenizer_folder), self._config),
            announces=announces,
            greets=announces and self._greet,
            import_path=sys.path,
            known=self._known,
            num_servers=self._num_servers,
            item_folder="" if self._items is None else str(self._items.path),
        )
        server = await ServerProcess.launch(start, self._listener, self._memory, self._hash_seed)
        self._announced = self._announced or announces
        for report in self._reports:
            server.link.send(report)
        return server

    async def _listen(self, number: int, server: ServerProcess) -> None:
        """Answers a server until it ends."""
        while (message := await server.link.receive()) is not None:
            match message:
                case Serving():
                    server.serving_since = time.monotonic()
                case Snapshot():
                    self._metrics.on_snapshot(number, message.scrape_id, message.families)
                case AskedOfParent():
                    self._answers.on_asked(server.link, message)
                case Answer():
                    server.calls.on_answer(message)
                case Placed():
                    self._broadcast(message, but=number)
                case CountUse():
                    self._limits.add(message.name, message.quantity, message.amount)

    def _calls_to(self, number: int) -> Calls | None:
        return self._servers[number].calls if number in self._servers else None

    def _ask(self, scrape_id: int) -> set[int]:
        self._broadcast(TakeSnapshot(scrape_id))
        return {number for number, server in self._servers.items() if server.serving_since is not None}

    def _own_families(self) -> Iterable[Metric]:
        if not self._setup.config.log_stats:
            return iter(())
        return chain.from_iterable(each.collect() for each in self._statistics)

    def _broadcast(self, message: ToServer, *, but: int | None = None) -> None:
        for number, server in self._servers.items():
            # A server that hangs need not know where prompts are, and this process would keep all such news for it.
            if number != but and not (isinstance(message, Placed) and server.link.is_behind):
                server.link.send(message)

    # -------------------------------------------------------------------------------------------------------------- end

    def _stop(self) -> None:
        """Handles SIGTERM and SIGINT. Passes each signal on to the servers: the second one makes them wait for
        nothing."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            process.send_signal(number)

    def _processes(self) -> Iterator[asyncio.subprocess.Process]:
        return (each.process for each in self._servers.values() if each.process.returncode is None)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        self._stopping.set()
        seconds = self._config.shutdown_timeout + GRACE_SECONDS + KILL_SECONDS
        running = [asyncio.create_task(process.wait()) for process in self._processes()]
        if running:
            await asyncio.wait(running, timeout=seconds)
        for process in self._processes():
            os.killpg(process.pid, signal.SIGKILL)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *running, return_exceptions=True)
        await self._fleet.close()
        os.close(self._memory)
        if self._items is not None:
            self._items.close()

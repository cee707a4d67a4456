"""The whole engines on a headless node: starts and ends them by node 0's orders."""

import asyncio

from msgspec.structs import replace

from quire.core.cluster.addresses import listen
from quire.core.cluster.messages import EndEngine, EngineEnded, EngineStarted, NodeStart, Order, StartEngine
from quire.core.cluster.participant import Participant
from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.core.wire.rank import EnginePlace
from quire.core.wire.rendezvous import Rendezvous, endpoint_of, listening_rendezvous
from quire.frontend.launch.launcher import EngineLauncher, EngineSubprocess, Listening

logger = get_logger(__name__)

END_SECONDS = 10.0
"""Limit of the wait for killed engines' processes. With much memory their end takes seconds."""


class NodeEngines:
    """The work of a node with engines. Implements `quire.core.cluster.node.NodeWork`."""

    def __init__(self, start: NodeStart, participant: Participant) -> None:
        self._start = start
        self._participant = participant
        self._engines: dict[int, EngineSubprocess] = {}  # by number
        self._former: dict[int, EngineSubprocess] = {}  # by number: the one before
        self._starts: dict[int, asyncio.Task[None]] = {}  # by number of the engine
        self._watches: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        for task in (*self._starts.values(), *self._watches):
            task.cancel()
        for engine in self._engines.values():
            engine.kill()
        ending = (*self._engines.values(), *self._former.values())
        await asyncio.gather(*(engine.wait_freed(END_SECONDS) for engine in ending))

    def on_input(self, message: bytes) -> None:
        """Ignores the message: workers' messages stay within their engine."""

    def on_order(self, order: Order) -> None:
        match order:
            case StartEngine():
                data = order.config.place.data
                if data in self._starts:
                    self._starts[data].cancel()
                if (before := self._engines.pop(data, None)) is not None:
                    self._former[data] = before
                    before.kill()
                self._starts[data] = asyncio.create_task(self._start_in_turn(data, order))
            case EndEngine(data):
                if (engine := self._engines.get(data)) is not None:
                    engine.kill()

    async def _start_in_turn(self, data: int, order: StartEngine) -> None:
        """Starts an engine when the one before with its number is gone, because that may hold the same devices."""
        try:
            if data in self._former:
                await self._former[data].wait_freed(END_SECONDS)
            self._start_engine(data, order)
        except (OSError, ConfigError) as error:  # the others go on
            reason = f"cannot be started: {error}"
            logger.error("engine %d %s", data, reason)
            self._participant.report(EngineEnded(data, 1, reason))
        except Exception as error:
            self._participant.on_failure(error)

    def _start_engine(self, data: int, order: StartEngine) -> None:
        facts, config = self._participant.facts, order.config
        own = replace(
            config,
            spec=replace(config.spec, path=self._start.folder),
            place=EnginePlace(data, data - facts.ranks[0], len(facts.ranks)),
            logging=self._start.logging,
            is_led_from_afar=True,
        )
        logger.info("starting engine %d on this node", data)
        launcher, opened = EngineLauncher(own, Listening(facts.address, self._start.keys)), None
        if order.opens_rendezvous:
            with listen(facts.address) as listener:  # the engine inherits the socket
                engine, opened = launcher.start(listening_rendezvous(listener, facts.address)), endpoint_of(listener)
        else:
            where = order.init_method
            engine = launcher.start(None if where is None else Rendezvous(where, address=facts.address))
        self._engines[data] = engine
        watch = asyncio.create_task(self._watch(data, engine))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        self._participant.report(EngineStarted(data, engine.address, opened))

    async def _watch(self, data: int, engine: EngineSubprocess) -> None:
        code, was_killed = await engine.wait(), engine.was_killed
        engine.kill()  # and workers that outlived it
        if self._engines.get(data) is engine:
            self._participant.report(EngineEnded(data, code, was_killed=was_killed))

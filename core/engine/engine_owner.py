"""Keeps an engine running for others: has its life, and none of its requests."""

from typing import Protocol

from quire.core.engine.borrowed_engine import EngineAddress
from quire.core.engine.launcher import Launcher
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.engine.supervisor import EngineMessage, EngineStatus, EngineSupervisor
from quire.core.errors import QuireError
from quire.core.wire import protocol
from quire.core.wire.protocol import EngineReady, SchedulerStats


class EngineOwnerListener(Protocol):
    """Whoever must know of a kept engine, to tell those that use it."""

    def on_started(self, number: int, engine: EngineAddress, ready: EngineReady) -> None:
        """An engine is ready."""

    def on_ended(self, number: int, end: QuireError) -> None:
        """It has ended; another one may follow."""

    def on_gone(self, number: int, error: QuireError) -> None:
        """No engine with this number follows."""

    def on_stats(self, number: int, stats: SchedulerStats) -> None:
        """The engine has reported."""


class EngineOwner:
    """One engine after another with the same number. Use from one event loop."""

    def __init__(self, number: int, launcher: Launcher, listener: EngineOwnerListener) -> None:
        self._number = number
        self._listener = listener
        self._stats = SchedulerStats()
        self._supervisor = EngineSupervisor(launcher, self, RestartPolicy())

    async def start(self) -> EngineReady:
        """See `EngineSupervisor.start`."""
        return await self._supervisor.start()

    @property
    def is_dead(self) -> bool:
        """Whether the engine is gone for good."""
        return self._supervisor.is_dead

    def status(self) -> EngineStatus:
        """See `EngineSupervisor.status`."""
        return self._supervisor.status()

    def give_up(self, reason: QuireError) -> None:
        """See `EngineSupervisor.give_up`."""
        self._supervisor.give_up(reason)

    async def close(self) -> None:
        """See `EngineSupervisor.close`."""
        await self._supervisor.close()

    # ------------------------------------------------------------------------------- what the supervisor asks and tells

    @property
    def has_work(self) -> bool:
        return self._stats.num_running + self._stats.num_waiting > 0

    def on_ready(self, ready: EngineReady) -> None:
        handle = self._supervisor.handle
        assert handle is not None
        self._listener.on_started(self._number, EngineAddress(handle.address, handle.keys, handle.pid), ready)

    def on_message(self, message: EngineMessage) -> None:
        if isinstance(message, (protocol.StepOutputs, protocol.Heartbeat)):
            self._stats = message.stats
            self._listener.on_stats(self._number, message.stats)

    def on_crash(self, end: QuireError) -> None:
        self._stats = SchedulerStats()
        self._listener.on_ended(self._number, end)

    def on_dead(self, error: QuireError) -> None:
        self._listener.on_gone(self._number, error)

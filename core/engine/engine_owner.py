"""Keeps an engine running on behalf of other processes. The owner holds none of the engine's requests."""

from typing import Protocol

from quire.core.engine.borrowed_engine import EngineAddress
from quire.core.engine.launcher import Launcher
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.engine.supervisor import EngineMessage, EngineStatus, EngineSupervisor
from quire.core.errors import QuireError
from quire.core.wire import protocol
from quire.core.wire.protocol import EngineReady, SchedulerStats


class EngineOwnerListener(Protocol):
    """Receives news of an owned engine, for the processes that borrow it."""

    def on_started(self, number: int, engine: EngineAddress, ready: EngineReady) -> None:
        """Handles an engine that is ready."""

    def on_ended(self, number: int, end: QuireError) -> None:
        """Handles the end of an engine; another may follow."""

    def on_gone(self, number: int, error: QuireError) -> None:
        """Handles the news that no engine with this number follows."""

    def on_stats(self, number: int, stats: SchedulerStats) -> None:
        """Handles an engine's statistics."""


class EngineOwner:
    """Owns one engine after another with the same number. Use from one event loop."""

    def __init__(self, number: int, launcher: Launcher, listener: EngineOwnerListener) -> None:
        self._number = number
        self._listener = listener
        self._stats = SchedulerStats()
        self._supervisor = EngineSupervisor(launcher, self, RestartPolicy())

    async def start(self) -> EngineReady:
        return await self._supervisor.start()

    @property
    def is_dead(self) -> bool:
        """True if the engine is gone for good."""
        return self._supervisor.is_dead

    def status(self) -> EngineStatus:
        return self._supervisor.status()

    def give_up(self, reason: QuireError) -> None:
        self._supervisor.give_up(reason)

    async def close(self) -> None:
        await self._supervisor.close()

    # ------------------------------------------------------------------------------- callbacks of the supervisor

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

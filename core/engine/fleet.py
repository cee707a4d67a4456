"""The engines of one process: their common start, health and end."""

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from quire.core.engine.engine_handle import EngineHandle, EngineUser
from quire.core.engine.fleet_status import FleetStatus
from quire.core.engine.launcher import Launcher
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import ModelLoadError, QuireError
from quire.core.wire.protocol import EngineReady


class Fleet:
    """Engines, each behind its handle. Use from one event loop.

    Args:
        launchers: of each engine, by number; each starts its engine, the first time and after a crash.
        user: hears of the engines.
        restarts: makes the rules that decide whether an engine that ended is followed by another.
        coupled: the engines cannot run without one another, so they end and are restarted together.
    """

    def __init__(
        self,
        launchers: Sequence[Launcher],
        user: EngineUser,
        *,
        coupled: bool,
        restarts: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self.engines = [EngineHandle(number, each, user, restarts()) for number, each in enumerate(launchers)]
        self.is_coupled = coupled

    async def start(self) -> list[EngineReady]:
        """Starts all engines, once; later calls wait for the same start. Raises as `EngineHandle.start`."""
        return await asyncio.gather(*(engine.start() for engine in self.engines))

    async def start_one(self) -> None:
        """Starts all engines, and returns when one serves. Raises EngineDeadError when all are gone for good."""
        starts = {asyncio.create_task(engine.start()) for engine in self.engines}
        try:
            while starts:
                done, starts = await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
                failures = [task.exception() for task in done]
                if None in failures:
                    return
            self.check_health()
        finally:
            for task in starts:
                task.cancel()

    @property
    def is_dead(self) -> bool:
        """True if all engines are gone for good."""
        return all(engine.is_dead for engine in self.engines)

    def check_health(self) -> None:
        """Raises EngineDeadError when all engines are gone for good. An engine that is being restarted is healthy."""
        if self.is_dead:
            self.engines[0].check_alive()

    def status(self) -> FleetStatus:
        """The state of all engines, and of each."""
        return FleetStatus.of([engine.status() for engine in self.engines])

    def give_up_with(self, error: QuireError) -> bool:
        """Handles the final end of one engine. Gives up the others and returns True if they cannot run without it."""
        if self.is_coupled:
            for engine in self.engines:
                engine.give_up(error)
        return self.is_coupled

    async def close(self) -> None:
        """Stops the engines: serving ones in order, all others by force."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def kill(self) -> None:
        """Kills the engines, and waits a few seconds for the processes of this host. For interpreter exit, and for use
        outside an event loop."""
        for engine in self.engines:
            engine.close_nowait()
        for engine in self.engines:
            engine.join()


def agreed(engines: Sequence[EngineReady]) -> EngineReady:
    """The joint capacity of engines. Requests may move between them, so the shortest limit holds for all.

    Raises:
        ModelLoadError: they are not of one kind.
    """
    first, *others = engines
    for number, other in enumerate(others, start=1):
        if other.block_size != first.block_size or len(other.kv_groups) != len(first.kv_groups):
            raise ModelLoadError(
                f"Engine {number} has other KV groups than engine 0. All engines must load the same checkpoint with "
                "the same options and version of Quire."
            )
    return replace(
        first,
        num_pages=sum(each.num_pages for each in engines),
        max_model_len=min(each.max_model_len for each in engines),
        weights_bytes=sum(each.weights_bytes for each in engines),
        kv_cache_bytes=sum(each.kv_cache_bytes for each in engines),
    )

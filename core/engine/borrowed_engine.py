"""Engines that another process owns, and that this process only uses."""

import asyncio

from msgspec import Struct

from quire.core.engine.failures import error_of
from quire.core.engine.launcher import NoMoreEnginesError
from quire.core.engine.restart_policy import Fault, RestartPolicy
from quire.core.engine.running_engine import EngineAddress, RunningEngine


class EngineReport(Struct, array_like=True, tag="engine"):
    """The state of the engine with a number, from its owner to those who borrow it.

    Attributes:
        engine: the running engine, once it is ready.
        end: why the last engine has ended; another follows unless `is_gone`.
        fault: whose fault that was.
        waits_for: the resource for which the next engine waits; None: nothing.
    """

    number: int
    engine: EngineAddress | None = None
    end: str = ""
    fault: Fault = "own"
    is_gone: bool = False
    waits_for: str | None = None


class BorrowedEngine(RunningEngine):
    """An engine that its owner ends. `kill` and `end` end its use alone."""

    is_owned = False
    was_killed = True  # its owner reports reasons, and no exit codes

    def __init__(self, engine: EngineAddress) -> None:
        super().__init__(engine.address, engine.keys, engine.pid)
        self._ended = asyncio.Event()

    async def _exit_code(self) -> int:
        await self._ended.wait()
        return 0

    def _kill(self) -> None:
        self._ended.set()


class BorrowingLauncher:
    """Waits for the engines with one number, whose owner reports them. Use from one event loop."""

    def __init__(self) -> None:
        self._report = EngineReport(0)  # the latest
        self._changed = asyncio.Event()
        self._borrowed: BorrowedEngine | None = None

    @property
    def waits_for(self) -> str | None:
        return self._report.waits_for

    def on_report(self, report: EngineReport) -> None:
        """Handles a change. Ends the use of an engine that has ended."""
        has_ended = self._report.engine not in (None, report.engine)
        self._report = report
        self._changed.set()
        if has_ended and self._borrowed is not None:
            self._borrowed.end(error_of(report.fault, report.end))

    def warm_up(self) -> None:
        """Does nothing: the owner does."""

    async def launch(self) -> BorrowedEngine:
        """The running engine, or the next one.

        Raises:
            NoMoreEnginesError: there will be none.
        """
        while self._report.engine is None:
            if self._report.is_gone:
                raise NoMoreEnginesError(self._report.end)
            self._changed.clear()
            await self._changed.wait()
        self._borrowed = BorrowedEngine(self._report.engine)
        return self._borrowed

    def retire(self) -> None:
        """Does nothing: the owner retires the engine."""

    def close(self) -> None:
        """Does nothing: there are no files."""


class FollowsOwner(RestartPolicy):
    """Leaves restarts to the engine's owner."""

    def add(self, *, ready_seconds: float | None, had_work: bool, had_output: bool, fault: Fault = "own") -> None:
        """Counts nothing."""

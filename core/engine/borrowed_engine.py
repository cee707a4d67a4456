"""Engines that another process owns, and that this process only uses."""

import asyncio

from msgspec import Struct

from quire.core.engine.launcher import NoMoreEnginesError
from quire.core.engine.restart_policy import Fault, RestartPolicy
from quire.core.errors import EngineDeadError, QuireError
from quire.core.wire.channel import CurveKeys


class EngineAddress(Struct, array_like=True, frozen=True):
    """The address of a running engine, and its keys."""

    address: str
    keys: CurveKeys | None
    pid: int | None  # None for a process on another host


class BorrowedEngine:
    """A handle on an engine that its owner ends."""

    def __init__(self, engine: EngineAddress) -> None:
        self.address = engine.address
        self.keys = engine.keys
        self.pid = engine.pid
        self.is_owned = False
        self._end: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Waits for the engine's end. Raises the error that the owner reports for it."""
        if (end := await asyncio.shield(self._end)) is not None:
            raise end
        return 0

    def kill(self) -> None:
        """Stops using the engine, which goes on for others."""
        self.end(None)

    async def wait_freed(self, seconds: float) -> None:
        """Returns at once, because the engine does not end with its use."""

    def join(self) -> None:
        """Returns at once, because the engine does not end with its use."""

    def end(self, end: QuireError | None) -> None:
        """Ends this use with the engine's error; None: the user stops by itself."""
        if not self._end.done():
            self._end.set_result(end)


class BorrowingLauncher:
    """Waits for the engines with one number, which their owner announces. Use from one event loop."""

    def __init__(self) -> None:
        self.waits_for: str | None = None  # as the owner last reported
        self._engine: EngineAddress | None = None
        self._gone: str | None = None
        self._changed = asyncio.Event()
        self._visit: BorrowedEngine | None = None

    def on_started(self, engine: EngineAddress) -> None:
        """Handles an engine that is ready."""
        self._engine = engine
        self._changed.set()

    def on_ended(self, end: QuireError) -> None:
        """Handles the end of that engine; PeerLostError: another engine was the cause."""
        self._engine = None
        if self._visit is not None:
            self._visit.end(end)

    def on_gone(self, reason: str) -> None:
        """Handles the news that no engine follows."""
        self._gone = reason
        self.on_ended(EngineDeadError(reason))
        self._changed.set()

    async def launch(self) -> BorrowedEngine:
        """The running engine, or the next one.

        Raises:
            NoMoreEnginesError: there will be none.
        """
        while self._engine is None:
            if self._gone is not None:
                raise NoMoreEnginesError(self._gone)
            self._changed.clear()
            await self._changed.wait()
        self._visit = BorrowedEngine(self._engine)
        return self._visit

    def retire(self) -> None:
        """Does nothing: the owner retires the engine."""

    def close(self) -> None:
        """Does nothing: there are no files."""


class FollowsOwner(RestartPolicy):
    """Leaves restarts to the engine's owner."""

    def add(self, *, ready_seconds: float | None, had_work: bool, had_output: bool, fault: Fault = "own") -> None:
        """Counts nothing."""

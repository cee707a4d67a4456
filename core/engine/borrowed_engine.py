"""Engines that somebody else launches, keeps and ends, and that this process only uses."""

import asyncio

from msgspec import Struct

from quire.core.engine.launcher import NoMoreEnginesError
from quire.core.engine.restart_policy import Fault, RestartPolicy
from quire.core.errors import EngineDeadError, QuireError
from quire.core.wire.channel import CurveKeys


class EngineAddress(Struct, array_like=True, frozen=True):
    """Where a running engine is, and the keys to it."""

    address: str
    keys: CurveKeys | None
    pid: int | None  # None for a process on another host


class BorrowedEngine:
    """See `EngineHandle`: the use of one engine, which its owner ends."""

    def __init__(self, engine: EngineAddress) -> None:
        self.address = engine.address
        self.keys = engine.keys
        self.pid = engine.pid
        self.is_owned = False
        self._end: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """See `EngineHandle.wait`. Raises what its owner knows of the engine's end."""
        if (end := await asyncio.shield(self._end)) is not None:
            raise end
        return 0

    def kill(self) -> None:
        """Ends the use. The engine notices, and goes on for others."""
        self.end(None)

    async def wait_freed(self, seconds: float) -> None:
        """The engine does not end with its use."""

    def join(self) -> None:
        """The engine does not end with its use."""

    def end(self, end: QuireError | None) -> None:
        """The engine has ended; None: its use has."""
        if not self._end.done():
            self._end.set_result(end)


class BorrowingLauncher:
    """See `Launcher`: waits for the engines with one number, which their owner tells of. Use from one event loop."""

    def __init__(self) -> None:
        self.waits_for: str | None = None  # as the owner told it last
        self._engine: EngineAddress | None = None
        self._gone: str | None = None
        self._changed = asyncio.Event()
        self._visit: BorrowedEngine | None = None

    def on_started(self, engine: EngineAddress) -> None:
        """An engine is ready."""
        self._engine = engine
        self._changed.set()

    def on_ended(self, end: QuireError) -> None:
        """That engine has ended; PeerLostError: because of another one."""
        self._engine = None
        if self._visit is not None:
            self._visit.end(end)

    def on_gone(self, reason: str) -> None:
        """No engine will follow."""
        self._gone = reason
        self.on_ended(EngineDeadError(reason))
        self._changed.set()

    async def launch(self) -> BorrowedEngine:
        """The engine that runs, or the next one.

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
        """The owner knows."""

    def close(self) -> None:
        """There is nothing on disk."""


class FollowsOwner(RestartPolicy):
    """Leaves to the engine's owner whether another one follows, and when."""

    def add(self, *, ready_seconds: float | None, had_work: bool, had_output: bool, fault: Fault = "own") -> None:
        """Counts nothing."""

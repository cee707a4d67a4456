"""One running engine as its user sees it, wherever its process is."""

from pathlib import Path

from msgspec import Struct

from quire.core.errors import QuireError
from quire.core.wire.channel import CurveKeys

FREE_SECONDS = 10.0
"""Limit of the next engine's wait for the killed processes of the one before. With much memory that takes seconds."""


class EngineAddress(Struct, array_like=True, frozen=True):
    """The address of a running engine, and its keys."""

    address: str
    keys: CurveKeys | None
    pid: int | None  # None for a process on another host


class RunningEngine:
    """An engine from its launch to its end: our own child, a node's, or one that another process of this host owns.

    Attributes:
        pid: None for an engine whose process is not on this host.
        is_owned: whether the engine ends with its user. Another one's engine only loses this user.
        was_killed: `kill` has ended it, and not something else before.
    """

    is_owned = True
    was_killed = False

    def __init__(self, address: str, keys: CurveKeys | None, pid: int | None) -> None:
        self.address = address
        self.keys = keys
        self.pid = pid
        self._is_over = False
        self._reason: QuireError | None = None

    async def wait(self) -> int:
        """Waits for the end of the process, and returns its exit code; negative: the signal that killed it.

        Raises:
            QuireError: `end` has ended the engine, or its host is lost.
        """
        code = await self._exit_code()
        if self._reason is not None and self.was_killed:
            raise self._reason
        return code

    def end(self, reason: QuireError) -> None:
        """Kills the engine for `reason`, which `wait` raises unless the engine has ended or was killed before."""
        if not self._is_over:
            self._reason = reason
            self.kill()

    def kill(self) -> None:
        """Kills the process and its workers without waiting. For a borrowed engine, makes `wait` return. Does nothing
        when called again, or after the end."""
        if not self._is_over:
            self._is_over = True
            self._kill()

    def save_flight(self, reason: str) -> Path | None:
        """Keeps what the flight recorder has of the engine, which has ended for `reason`. Returns where it is; None if
        there is nothing here."""
        return None

    def dump_stacks(self) -> bool:
        """Makes the process and its workers write their stacks to stderr. False if nothing will be written: the process
        is another owner's, or on another host."""
        return False

    async def wait_freed(self, seconds: float) -> None:
        """Waits, after `kill`, until the process and its workers have ended and freed what they held. After `seconds`
        it logs the processes that still live, and returns. Returns at once for processes of other hosts, which wait
        before they start the next engine, and of other owners."""

    def join(self) -> None:
        """Blocks as `wait_freed` waits, for a few seconds at most; for use outside an event loop."""

    async def _exit_code(self) -> int:
        """Waits as `wait` does."""
        raise NotImplementedError

    def _kill(self) -> None:
        """Kills as `kill` does. Called once only."""
        raise NotImplementedError

"""The interfaces of launchers and of the engine processes that they launch."""

from typing import Protocol

from quire.core.errors import EngineDeadError
from quire.core.wire.channel import CurveKeys


class NoMoreEnginesError(EngineDeadError):
    """The launcher has no engine to give, and never will have one."""


class EngineHandle(Protocol):
    """A running engine process: our own child, or one that another process owns.

    Attributes:
        pid: None for an engine whose process is not on this host.
        is_owned: whether the engine ends with its user. Another one's engine only loses this user.
    """

    address: str
    keys: CurveKeys | None
    pid: int | None
    is_owned: bool

    async def wait(self) -> int:
        """Waits for the end of the process, and returns its exit code; negative: the signal that killed it."""

    def kill(self) -> None:
        """Kills the process and its workers without waiting. For a borrowed engine, makes `wait` return. Does nothing
        after the end."""

    async def wait_freed(self, seconds: float) -> None:
        """Waits, after `kill`, until the process and its workers have ended and freed what they held. After `seconds`
        it logs the processes that still live, and returns. Returns at once for processes of other hosts or other
        owners."""

    def join(self) -> None:
        """Blocks as `wait_freed` waits, for a few seconds at most; for use outside an event loop."""


class Launcher(Protocol):
    """Starts engine processes, or waits for engines that another process starts.

    Attributes:
        waits_for: what is missing before it can start one, such as a node; None if it knows of nothing.
    """

    @property
    def waits_for(self) -> str | None: ...

    async def launch(self) -> EngineHandle:
        """Launches an engine. Any exception but NoMoreEnginesError counts as a failed start."""

    def retire(self) -> None:
        """Reports that no engine will be launched any more, to other hosts that would wait for the next."""

    def close(self) -> None:
        """Removes the launcher's files."""

"""What starts engine processes, and the processes that it starts, as the supervisor and the engine's users see them."""

from typing import Protocol

from quire.core.errors import EngineDeadError
from quire.core.wire.channel import CurveKeys


class NoMoreEnginesError(EngineDeadError):
    """A launcher has no engine to give, and never will."""


class EngineHandle(Protocol):
    """One running engine process, our own child or one that somebody else launched and will end.

    Attributes:
        pid: None for an engine whose process is not on this host.
        is_owned: whether the engine ends with its user. Another one's engine only loses this user.
    """

    address: str
    keys: CurveKeys | None
    pid: int | None
    is_owned: bool

    async def wait(self) -> int:
        """The exit code, once the process has ended (negative: the signal that killed it)."""

    def kill(self) -> None:
        """Ends the process and its workers at once, without waiting for its end; of another one's engine, makes `wait`
        return. Harmless when it has ended."""

    async def wait_freed(self, seconds: float) -> None:
        """After `kill`: returns when the process and its workers have ended, so that what they held is free for others.
        After so many seconds at most: then it says what still lives. At once for processes of other hosts, or of
        others."""

    def join(self) -> None:
        """As `gone`, where no event loop is held up: blocks, for a few seconds at most."""


class Launcher(Protocol):
    """Starts engine processes, or waits for those that somebody else starts.

    Attributes:
        waits_for: what is missing before it can start one, such as a node; None if it knows of nothing.
    """

    @property
    def waits_for(self) -> str | None: ...

    async def launch(self) -> EngineHandle:
        """Any exception but NoMoreEnginesError counts as a failed start."""

    def retire(self) -> None:
        """The last engine has ended, and `launch` is not called again. Tells others that would wait for the next."""

    def close(self) -> None:
        """Removes what the launcher made on disk."""

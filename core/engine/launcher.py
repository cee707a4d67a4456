"""The interface of launchers, which give one running engine after another."""

from typing import Protocol

from quire.core.engine.running_engine import RunningEngine
from quire.core.errors import EngineDeadError


class NoMoreEnginesError(EngineDeadError):
    """The launcher has no engine to give, and never will have one."""


class Launcher(Protocol):
    """Starts engine processes, or waits for engines that another process starts.

    Attributes:
        waits_for: what is missing before it can start one, such as a node; None if it knows of nothing.
    """

    @property
    def waits_for(self) -> str | None: ...

    def warm_up(self) -> None:
        """Makes the next launch fast, if the options ask for that. Called from time to time while an engine serves."""

    async def launch(self) -> RunningEngine:
        """Launches an engine, which takes memory and devices once the one before has freed them. Any exception but
        NoMoreEnginesError counts as a failed start."""

    def retire(self) -> None:
        """Reports that no engine will be launched any more, to other hosts that would wait for the next."""

    def close(self) -> None:
        """Removes the launcher's files."""

"""Engines that share experts, on this host: they are started together, and none goes on without the others."""

import os
from typing import Protocol

from quire.core.errors import EngineDeadError


class StartedEngine(Protocol):
    """A running engine that can be ended."""

    def end(self, reason: EngineDeadError) -> None:
        """Ends it at once. Harmless when it has ended."""


class EnginesTogether:
    """Where the workers of all engines meet, and which engines have been told of that place.

    An engine that is started again lacks peers: those of its former self cannot go on. So the others are ended, each
    one's supervisor starts it again, and all meet at another place.
    """

    def __init__(self) -> None:
        self._meeting_fd: int | None = None
        self._engines: dict[int, StartedEngine] = {}  # by number

    def meeting_of(self, number: int) -> int:
        """The descriptor of a file where the workers of engine `number`, which is about to start, meet all others."""
        if self._meeting_fd is None or number in self._engines:
            self._end(EngineDeadError(f"engine {number}, with which this one shares experts, has ended."))
            self._meeting_fd = os.memfd_create("quire-meeting")
        return self._meeting_fd

    def add(self, number: int, engine: StartedEngine) -> None:
        """Engine `number` has been started."""
        self._engines[number] = engine

    def close(self) -> None:
        """Frees the meeting place. Idempotent."""
        if self._meeting_fd is not None:
            os.close(self._meeting_fd)
            self._meeting_fd = None

    def _end(self, reason: EngineDeadError) -> None:
        for engine in self._engines.values():
            engine.end(reason)
        self._engines.clear()
        self.close()

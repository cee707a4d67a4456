"""The state of an engine, and of several engines as one, for health checks."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct


class EngineStatus(Struct, frozen=True, omit_defaults=True):
    """The state of one engine."""

    state: Literal["starting", "serving", "restarting", "dead"]
    silent_seconds: float | None  # since an engine's last message; a healthy engine sends one at least every 2 s
    reason: str | None = None  # why the engine is dead, or why it is being restarted
    waits_for: str | None = None  # what is missing before it can start, such as a node
    restarts: int = 0  # engines that followed one that ended


class FleetStatus(Struct, frozen=True):
    """The state of a frontend's engines.

    Attributes:
        engine: the state of all engines as one, which serves as long as any of them does. Its reason names the others.
        engines: the state of each engine, by number; empty for a single engine.
    """

    engine: EngineStatus
    engines: list[EngineStatus]

    @classmethod
    def of(cls, statuses: Sequence[EngineStatus]) -> "FleetStatus":
        """The status of engines, which are listed by number."""
        if len(statuses) == 1:
            return cls(statuses[0], [])
        best = min(statuses, key=lambda status: _ORDER.index(status.state))
        missing = [
            f"engine {number} is {each.state}" for number, each in enumerate(statuses) if each.state != "serving"
        ]
        reason = f"{'; '.join(missing)}." if missing else None
        restarts = sum(each.restarts for each in statuses)
        return cls(EngineStatus(best.state, best.silent_seconds, reason, restarts=restarts), list(statuses))


_ORDER = ("serving", "restarting", "starting", "dead")

"""Judges whether an engine that says nothing is dead.

An engine that holds requests sends a message at least every `BUSY_BEAT_SECONDS`, however long a step takes. So a short
silence means that its event loop hangs, or that a signal has stopped it. Three things look alike: the host gives it no
core, it waits for memory that was swapped out, or a call into a library keeps the interpreter. The system's figures
show each of them, and it gets more time.
"""

import time
from typing import NamedTuple

from quire.core import envs
from quire.core.process_activity import ActivityMeter, is_stopped

TICK_SECONDS = 0.2
"""The interval between two looks."""
BUSY_BEAT_SECONDS = 0.25
"""The longest pause between two messages of an engine that computes."""
IDLE_BEAT_SECONDS = 1.0
"""The longest pause between two messages of any other engine."""

_SUSPICIOUS_SECONDS = 0.5
_BLOCKED_SECONDS = 0.8
_COMPUTING_SECONDS = 10.0
_STOPPED_IDLE_SECONDS = 5.0
_FAR_SECONDS = 5.0


class Verdict(NamedTuple):
    """Why a silent engine counts as dead.

    Attributes:
        reason: the end of a sentence about the engine.
        is_stopped: a signal has stopped it, so it has no stack to show, and no request is to blame.
    """

    reason: str
    is_stopped: bool


class SilenceWatch:
    """Looks at one engine every `TICK_SECONDS`.

    A look that comes late counts as one tick: this process itself was stopped or starved meanwhile, and has not read
    the engine's messages.

    Args:
        pid: the engine's process; None if it is on another host.
        limit_seconds: the only limit, whatever the engine does; None: the limits of this file.
    """

    def __init__(self, pid: int | None, limit_seconds: float | None) -> None:
        self._pid = pid
        self._limit_seconds = limit_seconds
        self._looked_at = time.monotonic()
        self._heard_at = 0.0
        self._was_busy = False
        self._silent_seconds = 0.0
        self._blocked_seconds = 0.0
        self._meter: ActivityMeter | None = None

    def look(self, heard_at: float, *, is_busy: bool) -> Verdict | None:
        """Judges the engine now. None: it may go on.

        Args:
            heard_at: the time of its last message.
            is_busy: it is ready, and holds requests.
        """
        now = time.monotonic()
        tick = min(now - self._looked_at, 2 * TICK_SECONDS)
        self._looked_at = now
        if heard_at != self._heard_at or is_busy != self._was_busy:
            self._heard_at, self._was_busy = heard_at, is_busy
            self._silent_seconds = self._blocked_seconds = 0.0
            self._meter = None
            return None
        self._silent_seconds += tick
        if self._limit_seconds is not None:
            return self._silent(self._limit_seconds)
        if self._pid is None:
            return self._silent(_FAR_SECONDS if is_busy else envs.NUMBERS["ENGINE_HEARTBEAT_TIMEOUT_S"].default)
        if self._silent_seconds >= _SUSPICIOUS_SECONDS and is_stopped(self._pid):
            return self._stopped(is_busy=is_busy)
        if is_busy:
            return self._blocked(self._pid, tick)
        return self._silent(envs.NUMBERS["ENGINE_HEARTBEAT_TIMEOUT_S"].default)

    def _stopped(self, *, is_busy: bool) -> Verdict | None:
        if not is_busy and self._silent_seconds < _STOPPED_IDLE_SECONDS:
            return None
        return Verdict("was stopped by a signal (SIGSTOP) and was killed", is_stopped=True)

    def _blocked(self, pid: int, tick: float) -> Verdict | None:
        """Judges a busy engine by what its process does."""
        if self._meter is None:
            self._meter = ActivityMeter(pid)
            return None
        did = self._meter.look()
        self._silent_seconds -= min(tick, did.starved_seconds)
        if did.cpu_seconds < tick / 2 and not did.num_major_faults:
            self._blocked_seconds += max(0.0, tick - did.starved_seconds)
        if self._blocked_seconds < _BLOCKED_SECONDS:
            return self._silent(_COMPUTING_SECONDS)
        return Verdict(f"was silent for {self._silent_seconds:.1f} s with requests in hand and was killed", False)

    def _silent(self, limit: float) -> Verdict | None:
        if self._silent_seconds < limit:
            return None
        return Verdict(f"was silent for {self._silent_seconds:.0f} s and was killed", is_stopped=False)

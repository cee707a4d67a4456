"""The policy for restarts: whether an engine that ended is started again, and after which pause.

Five kinds of end are counted:

- Failed start: the engine could not be launched, or ended before it was ready. A start that succeeds resets this count.
- Useless start: a failed start whose reason lasts, such as a checkpoint that is gone. It is tried again for some time,
  because storage may only be away.
- Blamed start: a failed start that the engine blames on another engine. More of these are allowed, because the other
  engine's own count ends first. Only two engines that blame each other reach the limit.
- Fruitless run: the engine was ready, held requests, and produced no output. Any output resets this count.
- Any other end: the engine ended while idle, or after output. Such ends do not stop the restarts. After ends while idle
  the pause between starts grows, so that they cost little. The same holds for ends that somebody outside, a lost host
  or an ended peer is known to cause.

Beside these, the user may limit the restarts in a window of time, whatever their reason.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

Fault = Literal["own", "setting", "peer", "elsewhere"]
"""The party at fault: "own", this engine, as far as is known; "setting", its checkpoint or a setting, which lasts;
"peer", as this engine reports; "elsewhere", a host or a peer that is known to be gone, or somebody outside who ended
the engine."""

MAX_FAILED_STARTS = 8
"""Failed starts in a row after which the engine is still restarted. Their pauses add up to 16 s, in which a shortage of
descriptors or memory may pass."""
MAX_USELESS_STARTS = 2
"""Useless starts in a row after which the engine is started again, however soon they follow one another."""
LOST_WEIGHTS_SECONDS = 60.0
"""The same as a time, which a network's storage may take to come back."""
MAX_BLAMED_STARTS = 3 * MAX_FAILED_STARTS
MAX_FRUITLESS_RUNS = 3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
SETTLED_SECONDS = 10.0
"""An engine that was ready for this time is replaced at once, and so is one that produced output. After any other run
the pause doubles."""


class RestartPolicy:
    """Counts the ends of one engine after another.

    Args:
        max_failed_starts: failed starts in a row that another start follows.
        max_fruitless_runs: fruitless lives in a row that another start follows.
        max_restarts: restarts within `window_seconds`; None: as many as it takes.
        lost_weights_seconds: from the first of several useless starts in a row to the last that another start follows.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        max_failed_starts: int = MAX_FAILED_STARTS,
        max_fruitless_runs: int = MAX_FRUITLESS_RUNS,
        max_restarts: int | None = None,
        window_seconds: float = 600.0,
        lost_weights_seconds: float = LOST_WEIGHTS_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failed_starts = max_failed_starts
        self._max_fruitless_runs = max_fruitless_runs
        self._num_failed_starts = 0
        self._lost_weights_seconds = lost_weights_seconds
        self._num_useless_starts = 0
        self._useless_since: float | None = None
        self._useless_seconds = 0.0
        self._num_blamed_starts = 0
        self._num_fruitless_runs = 0
        self._num_short_runs = 0
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._clock = clock
        self._ends: deque[float] = deque()  # times of those in the window, if there is a limit

    def add(self, *, ready_seconds: float | None, had_work: bool, had_output: bool, fault: Fault = "own") -> None:
        """Counts the end of an engine.

        Args:
            ready_seconds: how long it was ready; None when it never was.
            had_work: it held requests at the end.
            had_output: it produced output for some request in its life.
            fault: whose fault the end is.
        """
        if self._max_restarts is not None:
            self._ends.append(now := self._clock())
            while self._ends[0] < now - self._window_seconds:
                self._ends.popleft()
        self._count_useless(is_useless=ready_seconds is None and fault == "setting")
        if ready_seconds is None:
            self._num_failed_starts += fault == "own"
            self._num_blamed_starts += fault == "peer"
        else:
            self._num_failed_starts = self._num_blamed_starts = 0
            if had_output:
                self._num_fruitless_runs = 0
            elif had_work and fault != "elsewhere":
                self._num_fruitless_runs += 1
        is_short = not had_output and (ready_seconds is None or ready_seconds < SETTLED_SECONDS)
        self._num_short_runs = self._num_short_runs + 1 if is_short else 0

    def _count_useless(self, *, is_useless: bool) -> None:
        now = self._clock()
        if not is_useless:
            self._num_useless_starts, self._useless_since = 0, None
            return
        self._num_useless_starts += 1
        self._useless_since = now if self._useless_since is None else self._useless_since
        self._useless_seconds = now - self._useless_since

    def acquit(self) -> None:
        """Forgets blamed starts, because a peer is known to be missing: the blame was right."""
        self._num_blamed_starts = 0

    @property
    def why_hopeless(self) -> str | None:
        """The reason why no other start is worth trying; None while one is."""
        if self._num_useless_starts > MAX_USELESS_STARTS and self._useless_seconds >= self._lost_weights_seconds:
            return (
                f"{self._num_useless_starts} starts in a row failed for such a reason, in {self._useless_seconds:.0f} "
                "s; QUIRE_LOST_WEIGHTS_TIMEOUT_S allows more time."
            )
        if self._num_failed_starts > self._max_failed_starts:
            return f"{self._num_failed_starts} starts in a row failed."
        if self._num_blamed_starts > MAX_BLAMED_STARTS:
            return f"{self._num_blamed_starts} starts in a row failed, as it says because of others."
        if self._num_fruitless_runs > self._max_fruitless_runs:
            return f"{self._num_fruitless_runs} engines in a row ended with requests in hand and without output."
        if self._max_restarts is not None and len(self._ends) > self._max_restarts:
            return (
                f"It has ended {len(self._ends)} times in {self._window_seconds:.0f} s; --max-restarts allows "
                f"{self._max_restarts}."
            )
        return None

    @property
    def pause_seconds(self) -> float:
        """The time to wait before the next start."""
        if not self._num_short_runs:
            return 0.0
        doublings = min(self._num_short_runs - 1, 16)  # more only overflow
        return min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS)

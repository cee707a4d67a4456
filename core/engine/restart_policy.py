"""Whether an engine that ended is started again, and after which pause.

Four kinds of end:

- Failed start: the engine could not be launched, or ended before it was ready. An engine that gets ready resets the
  count of these.
- Spoilt start: as that, but the engine says that another one has ended. Of these there may be more: the other one's own
  count ends first. Only two that blame each other come to the end of it.
- Fruitless life: the engine was ready, held requests, and produced no output. Any output resets the count of these.
- Neither: the engine ended while idle, or after it had produced output. Such ends alone never end the supervision,
  however many they are; the pause between starts grows, so that they cost little. Nor do those for which a lost host
  or an ended peer is known to be the reason.
"""

from typing import Literal

Fault = Literal["own", "peer", "elsewhere"]
"""Whose fault an end is: this engine's own, as far as is known; a peer's, as this engine says; or it is known that a
host or a peer is gone."""

MAX_FAILED_STARTS = 8
"""Failed starts in a row that another start follows. Their pauses add up to 16 s, in which a shortage of descriptors
or memory may pass."""
MAX_BLAMED_STARTS = 3 * MAX_FAILED_STARTS
MAX_FRUITLESS_RUNS = 3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
SETTLED_SECONDS = 10.0
"""An engine that was ready for so long is replaced at once. After a shorter life the pause doubles."""


class RestartPolicy:
    """Counts the ends of one engine after another.

    Args:
        max_failed_starts: failed starts in a row that another start follows.
        max_fruitless_runs: fruitless lives in a row that another start follows.
    """

    def __init__(
        self, *, max_failed_starts: int = MAX_FAILED_STARTS, max_fruitless_runs: int = MAX_FRUITLESS_RUNS
    ) -> None:
        self._max_failed_starts = max_failed_starts
        self._max_fruitless_runs = max_fruitless_runs
        self._num_failed_starts = 0
        self._num_blamed_starts = 0
        self._num_fruitless_runs = 0
        self._num_short_runs = 0

    def add(self, *, ready_seconds: float | None, had_work: bool, had_output: bool, fault: Fault = "own") -> None:
        """Counts the end of an engine.

        Args:
            ready_seconds: how long it was ready; None when it never was.
            had_work: it held requests at the end.
            had_output: it produced output for some request in its life.
            fault: whose fault the end is.
        """
        if ready_seconds is None:
            self._num_failed_starts += fault == "own"
            self._num_blamed_starts += fault == "peer"
        else:
            self._num_failed_starts = self._num_blamed_starts = 0
            if had_output:
                self._num_fruitless_runs = 0
            elif had_work and fault != "elsewhere":
                self._num_fruitless_runs += 1
        is_short = ready_seconds is None or ready_seconds < SETTLED_SECONDS
        self._num_short_runs = self._num_short_runs + 1 if is_short else 0

    def acquit(self) -> None:
        """A peer is known to be missing, so that those of spoilt starts were right."""
        self._num_blamed_starts = 0

    @property
    def why_hopeless(self) -> str | None:
        """Why no other start is worth trying; None while one is."""
        if self._num_failed_starts > self._max_failed_starts:
            return f"{self._num_failed_starts} starts in a row failed."
        if self._num_blamed_starts > MAX_BLAMED_STARTS:
            return f"{self._num_blamed_starts} starts in a row failed, as it says because of others."
        if self._num_fruitless_runs > self._max_fruitless_runs:
            return f"{self._num_fruitless_runs} engines in a row ended with requests in hand and without output."
        return None

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start."""
        if not self._num_short_runs:
            return 0.0
        doublings = min(self._num_short_runs - 1, 16)  # more only overflow
        return min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS)

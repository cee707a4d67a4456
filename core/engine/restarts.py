"""Whether an engine that ended is started again, and after which pause: what the ends of engines are evidence of.

Three kinds of end:

- The engine ended before it was ready, or could not be launched at all: a failed start. One that gets ready refutes it.
- It was ready, had requests in hand, and produced nothing: a fruitless life. One that produces any output refutes it.
- It ended while idle, or after it had produced output: evidence of nothing. Such ends alone never end the supervision,
  however many they are; the pause between starts grows, so that they cost little.
"""

MAX_FAILED_STARTS = 8
"""In a row, before no more are tried: 16 s of pauses, in which a shortage of descriptors or memory may pass."""
MAX_FRUITLESS_LIVES = 3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
SETTLED_SECONDS = 10.0
"""An engine that was ready for so long is replaced at once. After a shorter life the pause doubles."""


class Restarts:
    """Counts the ends of one engine after another.

    Args:
        max_failed_starts: in a row; one more is the last.
        max_fruitless_lives: likewise.
    """

    def __init__(
        self, *, max_failed_starts: int = MAX_FAILED_STARTS, max_fruitless_lives: int = MAX_FRUITLESS_LIVES
    ) -> None:
        self._max_failed_starts = max_failed_starts
        self._max_fruitless_lives = max_fruitless_lives
        self._num_failed_starts = 0
        self._num_fruitless_lives = 0
        self._num_short_lives = 0

    def add(self, *, ready_seconds: float | None, had_work: bool, had_output: bool) -> None:
        """An engine ended.

        Args:
            ready_seconds: how long it was ready; None when it never was.
            had_work: requests were in its hands at the end.
            had_output: it produced output for some request in its life.
        """
        if ready_seconds is None:
            self._num_failed_starts += 1
        else:
            self._num_failed_starts = 0
            if had_output:
                self._num_fruitless_lives = 0
            elif had_work:
                self._num_fruitless_lives += 1
        is_short = ready_seconds is None or ready_seconds < SETTLED_SECONDS
        self._num_short_lives = self._num_short_lives + 1 if is_short else 0

    @property
    def why_hopeless(self) -> str | None:
        """Why another start would end like those before; None while it is worth trying."""
        if self._num_failed_starts > self._max_failed_starts:
            return f"{self._num_failed_starts} starts in a row failed."
        if self._num_fruitless_lives > self._max_fruitless_lives:
            return f"{self._num_fruitless_lives} engines in a row ended with requests in hand and without output."
        return None

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start."""
        if not self._num_short_lives:
            return 0.0
        doublings = min(self._num_short_lives - 1, 16)  # more only overflow
        return min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS)

"""The recent rate at which requests finish. Retry-After for refused clients derives from it."""

from collections import deque

WINDOW_SECONDS = 30.0
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 3600.0


class Throughput:
    """Output tokens and finished requests of the last `WINDOW_SECONDS`, counted per second."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._buckets: deque[list[int]] = deque()  # [second, tokens, requests], oldest first

    def record(self, now: float, num_tokens: int, num_finished: int) -> None:
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append([second, 0, 0])
            self._trim(now)
        bucket = self._buckets[-1]
        bucket[1] += num_tokens
        bucket[2] += num_finished

    def rates(self, now: float) -> tuple[float, float]:
        """(output tokens per second, finished requests per second); zeros when nothing happened lately."""
        self._trim(now)
        if not self._buckets:
            return 0.0, 0.0
        seconds = max(now - max(self._started, self._buckets[0][0]), 1.0)
        return (
            sum(bucket[1] for bucket in self._buckets) / seconds,
            sum(bucket[2] for bucket in self._buckets) / seconds,
        )

    def wait_seconds(self, now: float, num_waiting: int) -> float | None:
        """Seconds until `num_waiting` requests in the queue will have been admitted; None where none has finished."""
        _, requests_per_second = self.rates(now)
        return num_waiting / requests_per_second if requests_per_second else None

    def retry_after_seconds(self, now: float, *, num_waiting: int, num_pending_tokens: int) -> float:
        """Seconds until the `num_waiting` requests in the queue will have been admitted.

        While no request has finished in the window, the estimate is the time for the `num_pending_tokens` output tokens
        that running requests may still generate.
        """
        tokens_per_second, requests_per_second = self.rates(now)
        if requests_per_second:
            seconds = num_waiting / requests_per_second
        elif tokens_per_second:
            seconds = num_pending_tokens / tokens_per_second
        else:
            seconds = MIN_RETRY_SECONDS
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _trim(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - WINDOW_SECONDS:
            self._buckets.popleft()

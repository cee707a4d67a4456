"""What the requests of one frontend went through because engines failed."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from quire.frontend.metrics.families import Labelled
from quire.frontend.metrics.histogram import Histogram

PAUSE_SECONDS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)


class RecoveryMetrics:
    """Requests that one engine took over.

    Args:
        families: makes families with the engine's labels.
    """

    def __init__(self, families: Labelled) -> None:
        self._families = families
        self._num_replays = 0
        self._pauses = Histogram(PAUSE_SECONDS)

    def on_replay(self) -> None:
        """Counts a request that the engine was sent with what other engines had made of it."""
        self._num_replays += 1

    def on_pause(self, seconds: float) -> None:
        """Counts a sequence that goes on `seconds` after the last message of the engine that had it."""
        self._pauses.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the families for one scrape."""
        replays = "Requests that an engine took over from one that had ended."
        pauses = "Seconds for which sequences stood still because their engine had ended."
        yield self._families.counter("quire:request_replays_total", replays, self._num_replays)
        yield self._families.histogram("quire:stream_pause_seconds", pauses, self._pauses)

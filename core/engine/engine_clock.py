"""The clock of an engine's host, as this process reads its own."""

import time

from quire.core.wire.protocol import RequestDelta


class EngineClock:
    """CLOCK_MONOTONIC of another host, which counts from that host's start.

    A message takes some time, so it makes the other clock look behind. Of all messages, the fastest one counts: times
    are off by what that took.
    """

    def __init__(self) -> None:
        self._seconds_behind = float("inf")  # of the other clock

    def hear(self, timestamp: float) -> None:
        """A message has come that was sent at `timestamp` by the other clock."""
        self._seconds_behind = min(self._seconds_behind, time.monotonic() - timestamp)

    def translate(self, deltas: list[RequestDelta]) -> None:
        """Has the times in deltas be those of this host's clock. Call it after `hear`."""
        for delta in deltas:
            if delta.queued_at:
                delta.queued_at += self._seconds_behind
            if delta.scheduled_at:
                delta.scheduled_at += self._seconds_behind

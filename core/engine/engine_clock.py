"""Converts times of an engine's host to this process's clock."""

import time

from quire.core.wire.protocol import RequestDelta


class EngineClock:
    """CLOCK_MONOTONIC of another host, which counts from that host's boot.

    A message takes time, which makes the other clock look behind. The fastest message so far gives the estimate, so
    converted times are off by its travel time.
    """

    def __init__(self) -> None:
        self._seconds_behind = float("inf")  # of the other clock

    def hear(self, timestamp: float) -> None:
        """Takes the send time of a message by the other clock."""
        self._seconds_behind = min(self._seconds_behind, time.monotonic() - timestamp)

    def translate(self, deltas: list[RequestDelta]) -> None:
        """Converts the times in `deltas` to this host's clock. Call it after `hear`."""
        for delta in deltas:
            if delta.queued_at:
                delta.queued_at += self._seconds_behind
            if delta.scheduled_at:
                delta.scheduled_at += self._seconds_behind

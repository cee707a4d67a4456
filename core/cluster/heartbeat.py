"""Detects the loss of a peer. A host that hangs, or a cut cable, closes no connection, so only missing heartbeats show
the loss."""

import time

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.5
"""Time without a message after which a peer is lost; noticing it takes up to one beat more, 3 s in all."""


class HeartbeatMonitor:
    """The time since one peer's last message. Call `is_lost` every `BEAT_SECONDS`."""

    def __init__(self) -> None:
        self._heard_at = self._checked_at = time.monotonic()

    def on_message(self) -> None:
        """Notes that the peer has sent a message."""
        self._heard_at = time.monotonic()

    def is_lost(self) -> bool:
        """Returns True if the peer is lost. Time in which this process itself did not run is not counted."""
        now = time.monotonic()
        late = now - self._checked_at - BEAT_SECONDS
        if late > BEAT_SECONDS:
            self._heard_at = min(now, self._heard_at + late)
        self._checked_at = now
        return now - self._heard_at > SILENCE_SECONDS

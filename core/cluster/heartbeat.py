"""Whether a peer is still there. A host that hangs, or a cut cable, closes no connection: only silence tells."""

import time

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.5
"""A peer that says nothing for so long is lost. With a beat's time for noticing it, that is three seconds."""


class HeartbeatMonitor:
    """The silence of one peer. Call `is_too_long` every `BEAT_SECONDS`."""

    def __init__(self) -> None:
        self._heard_at = self._checked_at = time.monotonic()

    def on_message(self) -> None:
        """The peer has said something."""
        self._heard_at = time.monotonic()

    def is_lost(self) -> bool:
        """Whether the peer is lost. Time in which this process itself did not run is not the peer's silence."""
        now = time.monotonic()
        late = now - self._checked_at - BEAT_SECONDS
        if late > BEAT_SECONDS:
            self._heard_at = min(now, self._heard_at + late)
        self._checked_at = now
        return now - self._heard_at > SILENCE_SECONDS

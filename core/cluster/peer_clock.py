"""Estimates how far another host's clock is from this one's."""

import time

from quire.core.cluster.node_compatibility import CLOCKS_APART_SECONDS

LATE_SECONDS = 1.0
"""How long a clock may look behind before it is judged to be."""


class PeerClock:
    """The clock of one peer, from its first message on.

    A message that was delayed, because this process was busy or the network was cut, looks like a clock that is behind.
    The messages queued after it look the same, but they arrive at once, and a clock stays behind. The estimate uses the
    message with the least delay.

    Attributes:
        seconds_apart: by how much the clock is ahead of this host's.
    """

    def __init__(self) -> None:
        self.seconds_apart = float("-inf")
        self._since = time.monotonic()

    def hear(self, clock: float) -> None:
        """Takes the send time of a message: seconds since 1970 by the peer's clock."""
        self.seconds_apart = max(self.seconds_apart, clock - time.time())

    @property
    def may_have_waited(self) -> bool:
        """True if the clock looks behind, but the peer's next messages may still show otherwise."""
        return self.seconds_apart < -CLOCKS_APART_SECONDS and time.monotonic() - self._since < LATE_SECONDS

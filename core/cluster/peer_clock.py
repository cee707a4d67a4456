"""How far another host's clock is from this one's, by what it says."""

import time

from quire.core.cluster.facts import CLOCKS_APART_SECONDS

LATE_SECONDS = 1.0
"""How long a clock may look behind before it counts as such."""


class PeerClock:
    """The clock of one peer, from its first message on.

    A message that waited, because this process was busy or the network was cut, looks like a clock that is behind. So
    do those that waited after it, and they come at once; a clock is behind for longer. Of all messages, the one that
    waited least counts.

    Attributes:
        seconds_apart: by how much the clock is ahead of this host's.
    """

    def __init__(self) -> None:
        self.seconds_apart = float("-inf")
        self._since = time.monotonic()

    def hear(self, clock: float) -> None:
        """A message has come that was sent at `clock`, in seconds since 1970 by the peer's clock."""
        self.seconds_apart = max(self.seconds_apart, clock - time.time())

    @property
    def may_have_waited(self) -> bool:
        """Whether the clock looks behind, and the peer's next messages may show that it is not."""
        return self.seconds_apart < -CLOCKS_APART_SECONDS and time.monotonic() - self._since < LATE_SECONDS

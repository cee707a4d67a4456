"""What each key has used in the last minute."""

import time
from collections import deque
from collections.abc import Callable

from quire.frontend.keys.caller import Quantity

WINDOW_SECONDS = 60


class _Minute:
    """Amounts of the last minute, by the second in which they were used."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()  # [second, amount], oldest first
        self.used = 0

    def trim(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] + 1 + WINDOW_SECONDS <= now:
            self.used -= self._seconds.popleft()[1]

    def add(self, now: float, amount: int) -> None:
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append([int(now), 0])
        self._seconds[-1][1] += amount
        self.used += amount

    def seconds_until_free(self, now: float, amount: int) -> float:
        """Seconds until `amount` of what was used is a minute old."""
        for second, used in self._seconds:
            amount -= used
            if amount <= 0:
                return second + 1 + WINDOW_SECONDS - now
        return float(WINDOW_SECONDS)


class RateLimits:
    """The limits of keys, in this process. No more than a limit is let through in any minute.

    Tokens of outputs are counted when they are there, so a key may exceed its limit by what its running requests
    generate; its next request then waits the longer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: dict[tuple[str, Quantity], _Minute] = {}

    async def take(self, name: str, quantity: Quantity, amount: int, limit: int) -> float:
        """See `Limits.take`."""
        return self.take_now(name, quantity, amount, limit)

    def take_now(self, name: str, quantity: Quantity, amount: int, limit: int) -> float:
        """As `take`, without a wait for anything. An amount above the limit passes when nothing else was used."""
        minute, now = self._minutes.setdefault((name, quantity), _Minute()), self._clock()
        minute.trim(now)
        excess = minute.used + min(amount, limit) - limit
        if excess > 0:
            return minute.seconds_until_free(now, excess)
        minute.add(now, amount)
        return 0.0

    def add(self, name: str, quantity: Quantity, amount: int) -> None:
        """See `Limits.add`."""
        minute, now = self._minutes.setdefault((name, quantity), _Minute()), self._clock()
        minute.trim(now)
        minute.add(now, amount)

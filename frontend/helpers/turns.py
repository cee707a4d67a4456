"""Whose question a helper answers next.

Keys take turns by the time that helpers have worked for them, however many questions each of them asks; without keys,
all questions are of one. The questions of a key wait in the order of their times of arrival, to which
`_SECONDS_PER_BYTE` of their sizes are added: small ones go first, and a large one waits no longer than that for small
ones which come later. One helper is left to small questions, and one to other keys than that which has the rest.
"""

import itertools
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from quire.core.errors import OverloadedError

SMALL_BYTES = 4096
_SECONDS_PER_BYTE = 1 / 4096

MAX_WAITING_BYTES = 2**28
"""Of the questions of one key that wait."""
RETRY_SECONDS = 10.0


class Ticket(NamedTuple):
    """A question's place in the queue.

    Attributes:
        turn: seconds of the event loop's clock.
        owner: the name of a key; empty without keys.
    """

    turn: float
    number: int
    num_bytes: int
    owner: str

    @property
    def is_small(self) -> bool:
        """True for questions that one helper is left to."""
        return self.num_bytes <= SMALL_BYTES


class Turns:
    """The questions that wait for helpers.

    Args:
        max_helpers: that work at the same time.
    """

    def __init__(self, max_helpers: int) -> None:
        self._most = max(1, max_helpers - 1)
        self._waiting: dict[tuple[str, bool], list[Ticket]] = {}  # by owner, and whether they are small; sorted
        self._num_bytes: Counter[str] = Counter()  # waiting, by owner
        self._served: dict[str, float] = {}  # seconds of helpers that have ended, by owner
        self._now = 0.0  # `_served` of the owner that got a helper last, at that time
        self._numbers = itertools.count()

    def enter(self, now: float, num_bytes: int, owner: str, busy: Collection[tuple[float, Ticket]]) -> Ticket:
        """Puts a question into the queue. Raises OverloadedError if its owner's wait already that hold too much.

        Args:
            now: seconds of the event loop's clock.
            num_bytes: the question's size, which says roughly how long it takes.
            busy: the times at which helpers began, and their questions.
        """
        if self._num_bytes[owner] + num_bytes > max(MAX_WAITING_BYTES, num_bytes):
            raise OverloadedError(
                f"The server is overloaded: work of {self._num_bytes[owner]} bytes waits for its helper processes. Try "
                f"again in {RETRY_SECONDS:g} s.",
                retry_after_seconds=RETRY_SECONDS,
            )
        has_others = any((owner, is_small) in self._waiting for is_small in (True, False))
        if not has_others and all(ticket.owner != owner for _, ticket in busy):
            # An owner that comes back begins with the count of the one whose turn it is: nobody saves up turns.
            self._served[owner] = max(self._served.get(owner, 0.0), self._now)
        ticket = Ticket(now + num_bytes * _SECONDS_PER_BYTE, next(self._numbers), num_bytes, owner)
        insort(self._waiting.setdefault((owner, ticket.is_small), []), ticket)
        self._num_bytes[owner] += num_bytes
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Takes a question out of the queue."""
        waiting = self._waiting[ticket.owner, ticket.is_small]
        waiting.remove(ticket)
        self._num_bytes[ticket.owner] -= ticket.num_bytes
        if not waiting:
            del self._waiting[ticket.owner, ticket.is_small]

    def next(self, now: float, busy: Collection[tuple[float, Ticket]]) -> Ticket | None:
        """The question that gets the next helper; arguments as for `enter`."""
        has_room = sum(not ticket.is_small for _, ticket in busy) < self._most
        counts = Counter(ticket.owner for _, ticket in busy)
        running = defaultdict[str, float](float)
        for since, ticket in busy:
            running[ticket.owner] += now - since
        heads = [
            waiting[0]
            for (owner, is_small), waiting in self._waiting.items()
            if (is_small or has_room) and not (owner and counts[owner] >= self._most)
        ]
        return min(heads, key=lambda each: (self._served[each.owner] + running[each.owner], each), default=None)

    def begin(self, ticket: Ticket) -> None:
        """Notes that a helper begins with a question."""
        self._now = max(self._now, self._served[ticket.owner])

    def end(self, ticket: Ticket, seconds: float) -> None:
        """Counts the time that a helper took for a question."""
        self._served[ticket.owner] += seconds

"""The scheduler's policies: the order of one tenant's requests.

A policy gives each sequence a sort key when it arrives. The scheduler keeps running requests in the order of their keys
and preempts the last; the waiting queue yields the first. `shares.py` orders requests of different tenants.
"""

from collections.abc import Callable
from functools import partial

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.request import PriorityKey
from quire.core.wire.protocol import EngineRequest

Policy = Callable[[EngineRequest, int, float], PriorityKey]
"""The key of a sequence of a request, by its turn (see `Turns`) and the time of its arrival in seconds."""


def fcfs(request: EngineRequest, turn: int, now: float) -> PriorityKey:
    """First come, first served."""
    return (turn,)


def priority(request: EngineRequest, turn: int, now: float, *, aging_seconds: float) -> PriorityKey:
    """The lowest priority value first, then first come.

    Waiting for `aging_seconds` is worth one level of priority, so that nothing waits for ever; 0: it is worth nothing.
    """
    if not aging_seconds:
        return (request.priority, turn)
    milliseconds = round(1000 * now) + request.priority * round(
        1000 * aging_seconds
    )  # integers: priorities have 64 bits
    return (milliseconds, turn)


def policy_of(limits: SchedulerLimits) -> Policy:
    """The policy that the limits name."""
    return fcfs if limits.policy == "fcfs" else partial(priority, aging_seconds=limits.priority_aging_seconds)


FIRST: PriorityKey = (-(2**64),)
"""The key of a request of the scheduler's own, which goes before all others."""
PER_SEQUENCE = 16


class Turns:
    """Numbers sequences in the order in which they are to be admitted.

    Requests have their turns as they come. The further sequences of a request with `n` of them have later turns, one
    after the other: a request that comes while they wait has its turn before those that are not admitted by then. Where
    there are more of them than half of the slots, `PER_SEQUENCE` other requests go before each further one.

    Args:
        num_slots: requests that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._few = max(1, num_slots // 2)
        self._next = 0
        self._admitted = 0  # the latest turn that was

    def take(self, num_sequences: int) -> list[int]:
        """The turns of a new request's sequences."""
        first = max(self._next, self._admitted)
        self._next = first + 1
        return [first + index + PER_SEQUENCE * max(0, index - self._few) for index in range(num_sequences)]

    def on_admitted(self, turn: int) -> None:
        """Notes that the sequence with this turn is admitted."""
        self._admitted = max(self._admitted, turn)

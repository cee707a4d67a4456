"""The scheduler's policies: the order of requests, and how much of a prompt a step computes.

A policy gives each request a sort key when it arrives. The scheduler keeps running requests in the order of their keys
and preempts the last; the waiting queue yields the first.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.request import PriorityKey, Request, RequestStatus
from quire.core.wire.protocol import EngineRequest


def fcfs(request: EngineRequest, arrival: int) -> PriorityKey:
    """First come, first served."""
    return (arrival,)


def priority(request: EngineRequest, arrival: int) -> PriorityKey:
    """The lowest priority value first, then first come."""
    return (request.priority, arrival)


POLICIES: dict[str, Callable[[EngineRequest, int], PriorityKey]] = {"fcfs": fcfs, "priority": priority}


class PrefillPolicy(Protocol):
    def chunk_size(self, num_tokens: int, budget: int, border: int, beside: int = 0) -> int:
        """The number of a request's `num_tokens` uncomputed tokens to compute in a step with `budget` tokens left.

        A snapshot of its recurrent state is due after `border` of them, if the step ends there. The step also encodes
        `beside` rows for the request, which the budget does not include.
        """


class ChunkedPrefill:
    """Prompts are split: a step computes as many tokens as its budget and the threshold for long prompts allow.

    A chunk ends where a snapshot is due.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._chunk = limits.largest_chunk

    def chunk_size(self, num_tokens: int, budget: int, border: int, beside: int = 0) -> int:
        return min(num_tokens, budget, self._chunk, border)


class WholePrefill:
    """A prompt is computed in one step or waits, wherever snapshots are due.

    Only a recomputation longer than any step's budget is split.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._max_num_batched_tokens = limits.max_num_batched_tokens

    def chunk_size(self, num_tokens: int, budget: int, border: int, beside: int = 0) -> int:
        if num_tokens <= budget:
            return num_tokens
        return budget if num_tokens + beside > self._max_num_batched_tokens else 0


class RequestQueue:
    """Waiting requests, the smallest key first. Removal is lazy: finished requests are dropped when they surface.

    Attributes:
        num_new_tokens: the sum of the requests' `num_new_tokens`.
    """

    def __init__(self) -> None:
        self.num_new_tokens = 0
        self._heap: list[tuple[PriorityKey, Request]] = []  # keys are unique, so requests are never compared
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, request: Request) -> None:
        heappush(self._heap, (request.priority_key, request))
        self._num_waiting += 1
        self.num_new_tokens += request.num_new_tokens

    def first(self) -> Request | None:
        """The request to admit next; it stays in the queue."""
        heap = self._heap
        while heap and heap[0][1].status is RequestStatus.FINISHED:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Removes and returns the request that `first` returned."""
        request = heappop(self._heap)[1]
        self._leave(request)
        return request

    def forget(self, request: Request) -> None:
        """Marks a waiting request as finished, so that it is never returned."""
        request.status = RequestStatus.FINISHED
        self._leave(request)
        if len(self._heap) > 2 * self._num_waiting + 64:  # else aborts behind a stuck head would pile up
            self._heap = [entry for entry in self._heap if entry[1].status is not RequestStatus.FINISHED]
            heapify(self._heap)

    def _leave(self, request: Request) -> None:
        self._num_waiting -= 1
        self.num_new_tokens -= request.num_new_tokens

"""The waiting requests: whose turn it is, and which of them is next."""

from heapq import heapify, heappop, heappush

from quire.core.scheduling.queued_bytes import QueuedBytes
from quire.core.scheduling.request import PriorityKey, Request, RequestStatus
from quire.core.scheduling.shares import Shares

_Line = list[tuple[PriorityKey, Request]]
"""One tenant's requests, as a heap; keys are unique, so requests are never compared."""


class RequestQueue:
    """Waiting requests. The next is the one with the smallest key of the tenant that was served least.

    Removal is lazy: finished requests are dropped when they surface.

    Args:
        shares: knows what each tenant was served.

    Attributes:
        num_new_tokens: the sum of the requests' `num_new_tokens`.
        held: the memory that they take.
    """

    def __init__(self, shares: Shares) -> None:
        self.num_new_tokens = 0
        self.held = QueuedBytes()
        self._shares = shares
        self._lines: dict[str, _Line] = {}  # by tenant
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def tenants(self) -> list[str]:
        """Tenants that have waiting requests."""
        return [name for name in list(self._lines) if self._head(name) is not None]

    def push(self, request: Request) -> None:
        self._shares.on_waiting(request, is_first=self._head(request.tenant) is None)
        heappush(self._lines.setdefault(request.tenant, []), (request.priority_key, request))
        self._num_waiting += 1
        self.num_new_tokens += request.num_new_tokens
        self.held.add(request)

    def first(self) -> Request | None:
        """The request to admit next; it stays in the queue."""
        if len(self._lines) == 1:  # the usual case
            [only] = self._lines
            return self._head(only)
        heads = [head for name in list(self._lines) if (head := self._head(name)) is not None]
        return min(heads, key=lambda each: (self._shares.served(each.tenant), each.priority_key), default=None)

    def pop(self) -> Request:
        """Removes and returns the request that `first` returned."""
        request = self.first()
        assert request is not None
        heappop(self._lines[request.tenant])
        self._leave(request)
        return request

    def forget(self, request: Request) -> None:
        """Marks a waiting request as finished, so that it is never returned."""
        request.status = RequestStatus.FINISHED
        self._leave(request)
        if sum(map(len, self._lines.values())) > 2 * self._num_waiting + 64:  # aborts behind a stuck head would pile up
            for name, line in self._lines.items():
                self._lines[name] = [entry for entry in line if entry[1].status is not RequestStatus.FINISHED]
                heapify(self._lines[name])

    def _head(self, tenant: str) -> Request | None:
        """The first request of a tenant; a tenant without any leaves `_lines`."""
        line = self._lines.get(tenant)
        if line is None:
            return None
        while line and line[0][1].status is RequestStatus.FINISHED:
            heappop(line)
        if line:
            return line[0][1]
        del self._lines[tenant]
        return None

    def _leave(self, request: Request) -> None:
        self._num_waiting -= 1
        self.num_new_tokens -= request.num_new_tokens
        self.held.remove(request)

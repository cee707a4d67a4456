"""Requests that wait for something besides their turn: pages that a load in flight brings, or their adapters."""

from quire.core.kv.page_loads import PageLoad
from quire.core.scheduling.adapter_slots import AdapterWait
from quire.core.scheduling.queued_bytes import QueuedBytes
from quire.core.scheduling.request import Request, RequestStatus

Awaited = PageLoad | AdapterWait
"""What a request waits for."""


class LoadingRequests:
    """Requests that have left the waiting queue until a load is done, or an adapter has a slot.

    Attributes:
        held: the memory that they take.
    """

    def __init__(self) -> None:
        self.held = QueuedBytes()
        self._requests: dict[Awaited, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    @property
    def num_new_tokens(self) -> int:
        """The sum of the requests' `num_new_tokens`."""
        return sum(request.num_new_tokens for requests in self._requests.values() for request in requests)

    def add(self, request: Request, load: Awaited) -> None:
        """Makes a request, which has left the queue, wait for `load`."""
        request.status = RequestStatus.LOADING
        self._requests.setdefault(load, []).append(request)
        self.held.add(request)

    def forget(self, request: Request) -> Awaited:
        """Drops a request that ends, and returns what it waited for. A load goes on, because it may serve others."""
        [awaited] = [awaited for awaited, requests in self._requests.items() if request in requests]
        self._requests[awaited].remove(request)
        self.held.remove(request)
        return awaited

    def take(self, load: Awaited) -> list[Request]:
        """Removes and returns the requests that waited for `load`, which is done. They belong in the queue again."""
        requests = self._requests.pop(load, [])
        for request in requests:
            request.status = RequestStatus.WAITING
            self.held.remove(request)
        return requests

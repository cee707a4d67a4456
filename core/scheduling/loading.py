"""Requests that wait for pages: a load in flight brings what they continue from."""

from quire.core.kv.page_loads import PageLoad
from quire.core.scheduling.request import Request, RequestStatus


class LoadingRequests:
    """Requests that have left the waiting queue until a load is done."""

    def __init__(self) -> None:
        self._requests: dict[PageLoad, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    @property
    def num_new_tokens(self) -> int:
        """The sum of the requests' `num_new_tokens`."""
        return sum(request.num_new_tokens for requests in self._requests.values() for request in requests)

    def add(self, request: Request, load: PageLoad) -> None:
        """Makes a request, which has left the queue, wait for `load`."""
        request.status = RequestStatus.LOADING
        self._requests.setdefault(load, []).append(request)

    def forget(self, request: Request) -> None:
        """Drops a request that ends. Its load goes on, because the pages may serve others."""
        for requests in self._requests.values():
            if request in requests:
                requests.remove(request)

    def take(self, load: PageLoad) -> list[Request]:
        """Removes and returns the requests that waited for `load`, which is done. They belong in the queue again."""
        requests = self._requests.pop(load, [])
        for request in requests:
            request.status = RequestStatus.WAITING
        return requests

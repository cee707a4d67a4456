"""The first request of the queue is yielded, and finished ones never are."""

import pytest

from quire.core.scheduling.queue import RequestQueue
from quire.core.scheduling.request import Request, RequestStatus
from quire.core.scheduling.shares import Shares
from tests.core.scheduling.fake_worker import make_request, scheduled


def queued(*keys: int) -> tuple[RequestQueue, list[Request]]:
    queue = RequestQueue(Shares())
    requests = [scheduled(make_request(str(key), 1), priority=key) for key in keys]
    for request in requests:
        queue.push(request)
    return queue, requests


def test_the_queue_yields_the_smallest_key_first() -> None:
    queue, _ = queued(3, 1, 2)
    assert [queue.pop().priority_key for _ in range(3) if queue.first()] == [(1,), (2,), (3,)]
    assert queue.first() is None


@pytest.mark.parametrize("count", [3, 500])
def test_forgotten_requests_never_come_out_and_do_not_pile_up(count: int) -> None:
    queue, requests = queued(*range(count))
    for request in requests[1:]:
        queue.forget(request)
        assert request.status is RequestStatus.FINISHED
    assert len(queue) == 1
    assert sum(map(len, queue._lines.values())) < 100
    assert queue.pop() is requests[0]
    assert (len(queue), queue.first()) == (0, None)

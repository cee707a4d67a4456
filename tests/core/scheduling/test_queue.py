"""Policies order the queue, prefill policies limit a step's part of a prompt, and the first request is yielded."""

import pytest

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.queue import POLICIES, ChunkedPrefill, RequestQueue, WholePrefill
from quire.core.scheduling.request import Request, RequestStatus
from tests.core.scheduling.fake_worker import make_request, scheduled


def limits(**options: int) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=10, **options)


def queued(*keys: int) -> tuple[RequestQueue, list[Request]]:
    queue = RequestQueue()
    requests = [scheduled(make_request(str(key), 1), priority=key) for key in keys]
    for request in requests:
        queue.push(request)
    return queue, requests


def test_fcfs_ranks_by_arrival_alone() -> None:
    key_of = POLICIES["fcfs"]
    assert key_of(make_request("a", 1, priority=9), 0) < key_of(make_request("b", 1, priority=0), 1)


def test_priority_ranks_low_values_first_and_ties_by_arrival() -> None:
    key_of = POLICIES["priority"]
    late_urgent, early, late = (
        key_of(make_request("a", 1, priority=-1), 7),
        key_of(make_request("b", 1, priority=3), 1),
        key_of(make_request("c", 1, priority=3), 2),
    )
    assert late_urgent < early < late


def test_chunks_are_bounded_by_budget_and_threshold() -> None:
    assert [ChunkedPrefill(limits()).chunk_size(num, 8, 100) for num in (3, 8, 20)] == [3, 8, 8]
    assert [ChunkedPrefill(limits(long_prefill_token_threshold=5)).chunk_size(num, 8, 100) for num in (3, 8, 20)] == [
        3,
        5,
        5,
    ]


def test_a_chunk_ends_where_a_snapshot_is_due() -> None:
    assert [ChunkedPrefill(limits()).chunk_size(num, 8, 6) for num in (3, 6, 20)] == [3, 6, 6]


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    whole = WholePrefill(limits())
    assert [whole.chunk_size(8, budget, 3) for budget in (10, 8, 7)] == [8, 8, 0]
    assert whole.chunk_size(11, 10, 3) == 10  # a recomputation that no step could hold


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
    assert len(queue._heap) < 100
    assert queue.pop() is requests[0]
    assert (len(queue), queue.first()) == (0, None)

"""Requests that can never be served are refused with the limit and the remedy; a full queue says when to return."""

import pytest

from quire.core.errors import OverloadedError
from quire.core.wire.protocol import EngineRequest
from quire.frontend.http.errors import describe
from tests.core.scheduling.fake_worker import Harness, make_request


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (make_request("a", []), ["holds no tokens"]),
        (make_request("a", 128), ["128 tokens", "--max-model-len"]),
        (make_request("a", 100, max_tokens=20), ["120 tokens", "holds 64", "--kv-cache-memory-bytes"]),
        (make_request("a", 5, output=[1, 2, 3], max_tokens=3), ["3 output tokens", "finished already"]),
    ],
    ids=["empty", "longer than the model", "larger than the pool", "already finished"],
)
def test_impossible_requests_are_refused_with_the_remedy(wire: EngineRequest, words: list[str]) -> None:
    failure = Harness(num_pages=16, max_model_len=128).offer(wire)
    assert failure is not None
    assert failure.kind == "invalid"
    assert all(word in failure.message for word in words), failure.message


def test_the_largest_request_that_fits_is_served_to_its_end() -> None:
    harness = Harness(num_pages=16, max_model_len=128)
    harness.add("a", 60, max_tokens=5)  # 65 tokens, of which the last is never computed: 64, exactly the pool
    harness.run()
    assert len(harness.streams["a"].token_ids) == 5


def test_whole_prompts_must_fit_into_a_step() -> None:
    whole = Harness(max_num_batched_tokens=10, enable_chunked_prefill=False)
    failure = whole.offer(make_request("a", 11))
    assert failure is not None
    assert "max_num_batched_tokens is 10" in failure.message
    assert "--enable-chunked-prefill" in failure.message
    assert whole.offer(make_request("a", 10)) is None
    assert Harness(max_num_batched_tokens=10).offer(make_request("a", 11)) is None


def test_ids_of_unfinished_requests_must_differ() -> None:
    harness = Harness()
    harness.add("a", 5)
    failure = harness.offer(make_request("a", 5))
    assert failure is not None
    assert "'a'" in failure.message
    harness.run()
    assert harness.offer(make_request("a", 5)) is None


def test_a_burst_fills_the_free_slots_and_then_the_queue() -> None:
    harness = Harness(max_num_seqs=2, max_num_queued_reqs=3)
    failures = [harness.offer(make_request(str(index), 4, max_tokens=9)) for index in range(7)]
    assert [failure is None for failure in failures] == [True] * 5 + [False] * 2
    harness.step()  # two run, three wait
    failure = harness.offer(make_request("late", 4))
    assert failure is not None
    assert failure.kind == "overloaded"
    assert "--max-num-queued-reqs is 3" in failure.message
    harness.run()
    assert harness.offer(make_request("late", 4)) is None


def test_slots_that_lack_pages_are_no_room() -> None:
    harness = Harness(num_pages=8, max_num_seqs=8, max_num_queued_reqs=1)
    harness.add("a", 24, max_tokens=4)
    harness.step()
    harness.add("b", 24)
    harness.step()  # b waits for pages, though seven slots are free
    failure = harness.offer(make_request("c", 4))
    assert failure is not None
    assert failure.kind == "overloaded"


def test_retry_after_comes_from_what_was_finished_lately() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_reqs=4)
    for index in range(5):
        harness.add(str(index), 4, max_tokens=1)
    for _ in range(5):
        harness.clock.now += 2.0
        harness.step()
    for index in range(5):  # one of these gets the free slot
        harness.add(f"more {index}", 4)
    failure = harness.offer(make_request("refused", 4))
    assert failure is not None
    # five requests finished in the eight seconds since the first did; five wait now
    assert failure.retry_after_seconds == pytest.approx(5 / (5 / 8))


def test_a_refusals_message_and_its_header_tell_the_same_seconds() -> None:
    """The header holds whole seconds, and the estimate seldom is one."""
    harness = Harness(max_num_seqs=1, max_num_queued_reqs=4)
    for index in range(5):
        harness.add(str(index), 4, max_tokens=1)
    for _ in range(5):
        harness.clock.now += 2.1
        harness.step()
    for index in range(5):
        harness.add(f"more {index}", 4)
    failure = harness.offer(make_request("refused", 4))
    assert failure is not None
    error = OverloadedError(failure.message, retry_after_seconds=failure.retry_after_seconds)
    told = describe(error).headers["Retry-After"]
    assert told == "9"  # 8.4
    assert f"Try again in {told} s." in failure.message

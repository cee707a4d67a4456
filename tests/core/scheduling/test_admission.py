"""Requests that can never be served are refused with the limit and the remedy; a full queue says when to return."""

import pytest
from msgspec.structs import replace

from quire.core.errors import OverloadedError
from quire.core.wire.media import Array, MediaItem
from quire.core.wire.protocol import EngineRequest, Grammar, PromptEmbeds
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


def test_the_queue_is_bounded_in_tokens_of_prompts() -> None:
    """Those that have to be computed: slots that are free take the first ones."""
    harness = Harness(max_num_seqs=1, max_num_queued_tokens=50)
    for index in range(3):
        harness.add(str(index), 20)
    harness.step()  # one runs, and 40 tokens wait
    harness.add("40 of 50", 20)
    failure = harness.offer(make_request("60 of 50", 1))
    assert failure is not None
    assert (failure.kind, failure.limit) == ("overloaded", "max_num_queued_tokens")
    assert "60 tokens of prompts wait, and --max-num-queued-tokens is 50" in failure.message
    harness.scheduler.abort(["1"])
    assert harness.offer(make_request("40 of 50 again", 1)) is None
    harness.run()
    assert harness.offer(make_request("an empty queue", 60)) is None


def embedded(request_id: str, num_bytes: int) -> EngineRequest:
    return replace(make_request(request_id, 1), prompt_embeds=PromptEmbeds("float32", bytes(num_bytes), b""))


def constrained(request_id: str, key: bytes, num_bytes: int) -> EngineRequest:
    return replace(make_request(request_id, 1), grammar=Grammar("xgrammar", key, bytes(num_bytes), ""))


def test_the_queue_is_bounded_in_bytes_of_what_waits() -> None:
    """Prompts, embeddings and grammars count; what several requests share counts once."""
    harness = Harness(max_num_seqs=1, max_num_queued_bytes=10_000)
    harness.add("runs", 4, max_tokens=40)
    harness.step()
    for index in range(20):
        assert harness.offer(constrained(f"grammar {index}", b"same", 5000)) is None
    assert harness.offer(embedded("embeds", 4000)) is None
    failure = harness.offer(make_request("late", 1))  # 5000 + 4000 + 21 tokens of 64
    assert failure is not None
    assert (failure.kind, failure.limit) == ("overloaded", "max_num_queued_bytes")
    assert "requests that hold 10344 bytes wait, and --max-num-queued-bytes is 10000" in failure.message
    harness.scheduler.abort([f"grammar {index}" for index in range(19)])
    assert harness.offer(make_request("room", 1)) is None  # the grammar has a user yet
    assert harness.offer(constrained("another grammar", b"other", 900)) is None
    assert harness.offer(make_request("full", 1)) is not None


def test_images_and_sounds_that_wait_count_by_their_bytes() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_bytes=10_000)
    harness.add("runs", 4, max_tokens=40)
    harness.step()
    item = MediaItem("image", b"x" * 32, [(0, 2)], {}, {"pixels": Array("<f4", (2500,), bytes(10_000))})
    assert harness.offer(make_request("image", 4, media=[item])) is None
    assert harness.offer(make_request("full", 1)) is not None
    harness.scheduler.abort(["image"])
    assert harness.offer(make_request("room", 1)) is None


def test_sequences_of_a_request_share_its_prompts_bytes() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_bytes=64 * 40)
    harness.add("runs", 4, max_tokens=40)
    harness.step()
    many = make_request("a", 30)
    sequences = [replace(many.sequences[0], request_id=f"a-{index}") for index in range(8)]
    assert harness.offer(replace(many, sequences=sequences)) is None
    assert harness.offer(make_request("b", 10)) is None
    assert harness.offer(make_request("c", 1)) is not None

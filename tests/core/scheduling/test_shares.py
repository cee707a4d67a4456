"""Tenants share an engine by weight, and no request of many sequences keeps the slots from others.

Steps and tokens are counted, not seconds.
"""

from msgspec.structs import replace

from quire.core.wire.protocol import EngineRequest, SequenceStart, Tenant
from tests.core.scheduling.fake_worker import Harness, alone, make_request


def of(tenant: str, name: str, *, weight: float = 1.0, prompt: int = 4, **options: object) -> EngineRequest:
    """A request of a tenant."""
    return replace(make_request(name, prompt, **options), tenant=Tenant(tenant, weight))


def offer(harness: Harness, *requests: EngineRequest) -> None:
    assert [harness.offer(each) for each in requests] == [None] * len(requests)


def first_token_steps(harness: Harness, name: str, *, at_most: int) -> int:
    """Steps until a request has a token."""
    for step in range(1, at_most + 1):
        if any(delta.request_id == name and delta.token_ids for delta in harness.step()):
            return step
    raise AssertionError(f"{name} has no token after {at_most} steps")


def test_a_thousand_requests_of_one_key_do_not_stall_anothers() -> None:
    harness = Harness(num_pages=256, max_num_seqs=8)
    offer(harness, *(of("a", f"a{index}", max_tokens=100) for index in range(1000)))
    for _ in range(5):
        harness.step()
    offer(harness, of("b", "b", max_tokens=3))
    assert first_token_steps(harness, "b", at_most=3) <= 3
    assert harness.scheduler.stats().num_preemptions == 1


def test_it_is_so_without_room_for_pages_too() -> None:
    harness = Harness(num_pages=16, max_num_seqs=8)
    offer(harness, *(of("a", f"a{index}", prompt=20, max_tokens=40) for index in range(20)))
    for _ in range(5):
        harness.step()
    offer(harness, of("b", "b", prompt=20, max_tokens=3))
    first_token_steps(harness, "b", at_most=8)
    harness.run()
    for name in ("a0", "a19", "b"):
        assert harness.streams[name].finish_reason is not None


def test_tenants_are_served_by_weight() -> None:
    """Of 40 requests that finish first, the tenant with three times the weight has three times as many."""
    harness = Harness(num_pages=256, max_num_seqs=4)
    for index in range(60):
        offer(harness, of("light", f"l{index}"), of("heavy", f"h{index}", weight=3.0))
    finished = []
    while len(finished) < 40:
        finished += [delta.request_id[0] for delta in harness.step() if delta.finish_reason is not None]
    assert 27 <= finished[:40].count("h") <= 33


def test_long_prompts_count_more_than_short_ones() -> None:
    harness = Harness(num_pages=256, max_num_seqs=2, max_num_batched_tokens=128)
    for index in range(30):
        offer(
            harness, of("long", f"l{index}", prompt=60, max_tokens=1), of("short", f"s{index}", prompt=6, max_tokens=1)
        )
    finished = []
    while len(finished) < 22:
        finished += [delta.request_id[0] for delta in harness.step() if delta.finish_reason is not None]
    assert finished.count("s") >= 5 * finished.count("l")


def test_nobody_saves_up_turns() -> None:
    """A tenant that was away for long gets no more than its half when it comes."""
    harness = Harness(num_pages=256, max_num_seqs=4)
    offer(harness, *(of("a", f"a{index}") for index in range(200)))
    while sum(each.finish_reason is not None for each in harness.streams.values()) < 100:
        harness.step()
    offer(harness, *(of("b", f"b{index}") for index in range(100)))
    finished = []
    while len(finished) < 44:
        finished += [delta.request_id[0] for delta in harness.step() if delta.finish_reason is not None]
    assert 18 <= finished[4:].count("b") <= 24  # four of a ran when b came


def test_a_request_of_many_sequences_leaves_slots_to_others() -> None:
    harness = Harness(num_pages=256, max_num_seqs=8)
    starts = [SequenceStart(f"many_{index}", index) for index in range(2000)]
    many = replace(make_request("many", 4, max_tokens=100), sequences=starts)
    offer(harness, many)
    for _ in range(5):
        harness.step()
    for index in range(4):
        offer(harness, make_request(f"one{index}", 4, max_tokens=2))
    for _ in range(12):
        harness.step()
    assert all(len(harness.streams[f"one{index}"].token_ids) == 2 for index in range(4))
    assert len(harness.streams["many_0"].token_ids) >= 10, "the many go on all the while"


def test_sequences_that_gave_a_slot_end_as_ever() -> None:
    harness = Harness(num_pages=256, max_num_seqs=4)
    many = replace(make_request("many", 4, max_tokens=20), sequences=[SequenceStart(f"m{i}", i) for i in range(8)])
    offer(harness, many)
    for _ in range(3):
        harness.step()
    offer(harness, make_request("one", 4, max_tokens=2), make_request("two", 4, max_tokens=2))
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    for start in many.sequences:
        tokens, reason = alone(replace(many, sequences=[start]), harness.max_model_len)
        assert (harness.streams[start.request_id].token_ids, harness.streams[start.request_id].finish_reason) == (
            tokens,
            reason,
        )


def test_two_of_one_request_are_no_crowd() -> None:
    """Nothing is taken from requests of few sequences: half of the slots are theirs."""
    harness = Harness(num_pages=256, max_num_seqs=4)
    for name in ("a", "b", "c"):
        starts = [SequenceStart(f"{name}{index}", index) for index in range(2)]
        offer(harness, replace(make_request(name, 4, max_tokens=5), sequences=starts))
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0

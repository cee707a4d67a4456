"""Random workloads of thousands of requests, run against a fake worker that notices every paging mistake."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.wire.protocol import EngineRequest, FinishReason
from quire.core.wire.repetition import RepetitionDetection
from tests.core.scheduling.fake_worker import (
    FULL,
    VOCAB_SIZE,
    FakeDrafter,
    Harness,
    alone,
    expect_outputs,
    make_request,
    resumed_after,
    start_of,
    window,
)

MAX_MODEL_LEN = 48
TWICE = RepetitionDetection(max_pattern_size=1, min_count=2)


def random_requests(rng: random.Random, count: int, *, special: bool = False) -> list[EngineRequest]:
    """Short and long prompts, a third with a shared beginning, some that resume, stop early or ignore EOS.

    Some of the `special` ones have salts, and some watch for repetitions.
    """
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(20)] for _ in range(3)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randrange(20)] if rng.random() < 0.4 else []
        prompt = stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 8, 16, 24]))]
        max_tokens = rng.choice([1, 2, 5, 12, 40])
        output = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, max_tokens))] if max_tokens > 8 else []
        if rng.random() < 0.7 or len(prompt) + len(output) >= MAX_MODEL_LEN:
            output = []
        requests.append(
            make_request(
                str(index),
                prompt,
                seed=rng.randrange(1000),
                priority=rng.randrange(3),
                output=output,
                cache_salt=rng.choice([None, "a"]) if special else None,
                max_tokens=max_tokens,
                min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.3 else 0,
                ignore_eos=rng.random() < 0.2,
                stop_token_ids=[5, 6] if rng.random() < 0.3 else None,
                repetition_detection=TWICE if special and rng.random() < 0.3 else None,
            )
        )
    return requests


def drive(harness: Harness, requests: list[EngineRequest], rng: random.Random, abort_rate: float = 0.0) -> None:
    """Feeds requests in bursts while steps run, and aborts some of them at any moment."""
    pending = list(reversed(requests))
    while pending or harness.scheduler.has_unfinished():
        for _ in range(rng.choice([0, 0, 1, 2, 12])):
            if pending:
                assert harness.offer(pending.pop()) is None
        if abort_rate and rng.random() < abort_rate:
            harness.abort(*rng.sample(list(harness.streams), min(3, len(harness.streams))))
        if harness.scheduler.has_unfinished() or harness.in_flight:
            harness.step()
    harness.run()


CASES = [
    # roomy, no pressure
    {"num_pages": 400, "max_num_seqs": 32, "max_num_batched_tokens": 128},
    # as few pages as one request may need: preemption all the time
    {"num_pages": 12, "max_num_seqs": 8, "max_num_batched_tokens": 16},
    {"num_pages": 30, "max_num_seqs": 16, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 3},
    {"num_pages": 24, "max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_chunked_prefill": False},
    {"num_pages": 24, "max_num_seqs": 6, "max_num_batched_tokens": 5, "enable_prefix_caching": False},
    {"num_pages": 40, "max_num_seqs": 3, "max_num_batched_tokens": 2, "block_size": 2},
    {"num_pages": 60, "max_num_seqs": 16, "max_num_batched_tokens": 40, "block_size": 1},
]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_do_not_depend_on_the_schedule(case: dict, depth: int, policy: str) -> None:
    rng = random.Random(f"{case} {depth} {policy}")
    harness = Harness(max_model_len=MAX_MODEL_LEN, depth=depth, policy=policy, check=False, **case)
    requests = random_requests(rng, 400)
    drive(harness, requests, rng)
    expect_outputs(harness, requests)


@pytest.mark.parametrize(("depth", "drafting"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_running_requests_survive_that_their_pages_are_taken(case: dict, depth: int, drafting: bool) -> None:
    rng = random.Random(f"{case} {depth}")
    drafter = FakeDrafter(depth) if drafting else None
    harness = Harness(max_model_len=MAX_MODEL_LEN, depth=depth, drafter=drafter, **case)
    requests = random_requests(rng, 40)
    pending = list(reversed(requests))
    while pending or harness.scheduler.has_unfinished():
        if pending and rng.random() < 0.7:
            assert harness.offer(pending.pop()) is None
        if rng.random() < 0.1:
            assert harness.scheduler.reset_prefix_cache(preempt_running=True)
            assert harness.scheduler.stats().kv_cache_usage == 0
        if harness.scheduler.has_unfinished() or harness.in_flight:
            harness.step()
    harness.run()
    assert harness.scheduler.stats().num_preemptions
    expect_outputs(harness, requests)


GROUPS = {
    "a window alone": [window(6)],
    "all and a window": [FULL, window(9)],
    "two windows and all": [window(3), window(17), FULL],
    "one of five": [FULL, *[window(8)] * 5],
    "a window of one": [window(1), FULL],
}

GROUP_CASES = [
    # as many pages as one request may need, and half as many again
    {"share": 1.0, "max_num_seqs": 8, "max_num_batched_tokens": 16},
    {"share": 1.5, "max_num_seqs": 8, "max_num_batched_tokens": 40, "long_prefill_token_threshold": 5},
    {"share": 1.0, "max_num_seqs": 8, "max_num_batched_tokens": 9, "long_prefill_token_threshold": 1, "block_size": 1},
    {"share": 1.0, "max_num_seqs": 5, "max_num_batched_tokens": 48, "enable_chunked_prefill": False},
    {"share": 1.2, "max_num_seqs": 4, "max_num_batched_tokens": 3, "block_size": 2},
    {"share": 1.0, "max_num_seqs": 8, "max_num_batched_tokens": 7, "block_size": 1, "enable_prefix_caching": False},
]


def num_pages_alone(groups: str, limits: dict, num_tokens: int) -> int:
    """Pages that a request of `num_tokens` tokens needs at most."""
    chunk = limits.get("long_prefill_token_threshold", limits["max_num_batched_tokens"])
    sizes = {"block_size": limits["block_size"], "largest_chunk": chunk}
    return sum(group.max_pages(num_tokens, **sizes) for group in GROUPS[groups])


@pytest.mark.parametrize(("depth", "drafting"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("case", GROUP_CASES, ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_every_kv_group_reads_what_it_needs_and_one_request_always_fits(
    groups: str, case: dict, depth: int, drafting: bool
) -> None:
    rng = random.Random(f"{groups} {case} {depth}")
    limits = {name: value for name, value in case.items() if name != "share"}
    limits.setdefault("block_size", 4)
    num_alone = num_pages_alone(groups, limits, MAX_MODEL_LEN - 1)
    harness = Harness(
        max_model_len=MAX_MODEL_LEN,
        num_pages=int(num_alone * case["share"]),
        depth=depth,
        kv_groups=GROUPS[groups],
        drafter=FakeDrafter(depth) if drafting else None,
        **limits,
    )
    requests = random_requests(rng, 120)
    drive(harness, requests, rng, abort_rate=0.1)
    expect_outputs(harness, requests)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("case", GROUP_CASES, ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_a_request_that_is_alone_is_never_preempted(groups: str, case: dict, drafting: bool) -> None:
    limits = {"block_size": 4} | {name: value for name, value in case.items() if name != "share"}
    for length in (1, 7, 20, MAX_MODEL_LEN - 1):
        harness = Harness(
            max_model_len=MAX_MODEL_LEN,
            num_pages=num_pages_alone(groups, limits, MAX_MODEL_LEN - 1),
            kv_groups=GROUPS[groups],
            drafter=FakeDrafter(length) if drafting else None,
            **limits,
        )
        harness.add("alone", length, max_tokens=None)
        harness.run()
        last = harness.streams["alone"].last
        assert last is not None
        assert (last.finish_reason, last.num_preemptions) == (FinishReason.LENGTH, 0)


@pytest.mark.parametrize("ahead", [1, 5])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_running_requests_have_places_for_drafts(groups: str, ahead: int) -> None:
    """Past the planned tokens of each, in pages of its own; one that is alone is never preempted for them."""
    rng = random.Random(f"{groups} {ahead}")
    limits = {"block_size": 4, "max_num_batched_tokens": 24, "num_lookahead_tokens": ahead}
    most = MAX_MODEL_LEN - 1 + ahead
    num_pages = sum(spec.max_pages(most, block_size=4, largest_chunk=24 + ahead) for spec in GROUPS[groups])
    harness = Harness(
        max_model_len=MAX_MODEL_LEN,
        num_pages=num_pages,
        kv_groups=GROUPS[groups],
        drafter=FakeDrafter(ahead),
        depth=2,
        **limits,
    )
    harness.add("alone", 7, max_tokens=None)
    harness.run()
    last = harness.streams["alone"].last
    assert last is not None
    assert (last.finish_reason, last.num_preemptions) == (FinishReason.LENGTH, 0)
    requests = random_requests(rng, 40)
    drive(harness, requests, rng)
    expect_outputs(harness, requests)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_do_not_depend_on_drafts(case: dict, depth: int) -> None:
    rng = random.Random(f"{case} {depth}")
    harness = Harness(max_model_len=MAX_MODEL_LEN, depth=depth, drafter=FakeDrafter(depth), **case)
    requests = random_requests(rng, 150, special=True)
    drive(harness, requests, rng, abort_rate=0.05)
    expect_outputs(harness, requests)
    if case is CASES[0]:  # where nothing is short, drafts of all lengths should be accepted to all extents
        rows = harness.worker.num_tokens_of_rows
        assert min(rows[drafts, tokens] for drafts in (1, 2, 3) for tokens in range(1, 2 + drafts)) > 0


@pytest.mark.parametrize("drafting", [False, True])
def test_a_crash_at_any_step_changes_no_output(drafting: bool) -> None:
    """Each new engine gets the tokens that were delivered, until every request has ended."""
    rng = random.Random(5)
    requests = random_requests(rng, 40)
    by_id = {start_of(request).request_id: request for request in requests}
    delivered = {name: list(start_of(request).output_token_ids) for name, request in by_id.items()}
    pending, num_lives = list(by_id), 0
    while pending:
        num_lives += 1
        drafter = FakeDrafter(num_lives) if drafting else None
        harness = Harness(max_model_len=MAX_MODEL_LEN, num_pages=24, depth=2, drafter=drafter)
        for name in pending:
            assert harness.offer(resumed_after(delivered[name], by_id[name])) is None
        for _ in range(rng.randrange(12)):
            harness.step()
        for name in pending:
            delivered[name] += harness.streams[name].token_ids
        pending = [name for name in pending if harness.streams[name].finish_reason is None]
    assert num_lives > 10
    for name, request in by_id.items():
        assert delivered[name] == start_of(request).output_token_ids + alone(request, MAX_MODEL_LEN)[0]


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_pages", [14, 48])
def test_aborts_at_any_moment_lose_nothing(num_pages: int, depth: int, drafting: bool) -> None:
    rng = random.Random(f"{num_pages} {depth}")
    drafter = FakeDrafter(depth) if drafting else None
    harness = Harness(max_model_len=MAX_MODEL_LEN, num_pages=num_pages, depth=depth, drafter=drafter)
    requests = random_requests(rng, 500, special=True)
    drive(harness, requests, rng, abort_rate=0.2)
    expect_outputs(harness, requests)
    reasons = [stream.finish_reason for stream in harness.streams.values()]
    assert min(reasons.count(reason) for reason in FinishReason) > 3, "the workload should reach every kind of end"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 3),
    num_pages=st.integers(12, 40),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(1, 60),
    threshold=st.sampled_from([0, 1, 7]),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    drafting=st.booleans(),
)
def test_any_limits_keep_the_invariants(
    seed, depth, num_pages, max_num_seqs, budget, threshold, policy, caching, drafting
):
    rng = random.Random(seed)
    harness = Harness(
        max_model_len=MAX_MODEL_LEN, num_pages=num_pages, depth=depth, max_num_seqs=max_num_seqs, policy=policy,
        max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, enable_prefix_caching=caching,
        drafter=FakeDrafter(seed) if drafting else None,
    )  # fmt: skip
    requests = random_requests(rng, 25)
    drive(harness, requests, rng, abort_rate=0.1)
    expect_outputs(harness, requests)


def test_pressure_preempts_and_sharing_saves_work() -> None:
    """The workloads above would prove little if they never preempted or never shared."""
    rng = random.Random(3)
    requests = random_requests(rng, 200)
    computed, preemptions = {}, {}
    for caching in (True, False):
        harness = Harness(max_model_len=MAX_MODEL_LEN, num_pages=20, enable_prefix_caching=caching, check=False)
        for request in requests:
            assert harness.offer(request) is None
        while harness.scheduler.has_unfinished():
            harness.step()
        computed[caching] = harness.worker.num_computed_tokens
        preemptions[caching] = harness.scheduler.stats().num_preemptions
    assert min(preemptions.values()) > 10
    assert computed[True] < 0.9 * computed[False]


@pytest.mark.parametrize("depth", [1, 2])
def test_fcfs_first_come_first_scheduled_even_under_pressure(depth: int) -> None:
    rng = random.Random(depth)
    harness = Harness(max_model_len=MAX_MODEL_LEN, num_pages=16, depth=depth)
    first_seen: list[str] = []
    requests = random_requests(rng, 200)
    for request in requests:
        harness.clock.now += 1.0
        assert harness.offer(request) is None
    while harness.scheduler.has_unfinished():
        harness.clock.now += 1.0
        for delta in harness.step():
            if delta.request_id not in first_seen:
                first_seen.append(delta.request_id)
    started = [harness.streams[start_of(request).request_id].last.scheduled_at for request in requests]  # type: ignore[union-attr]
    assert started == sorted(started)


def test_kv_groups_give_back_pages_preempt_and_share() -> None:
    """The workloads with several KV groups would prove little if they never did these things."""
    rng = random.Random(4)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": 4}
    num_pages = num_pages_alone("two windows and all", limits, MAX_MODEL_LEN - 1)
    harness = Harness(
        max_model_len=MAX_MODEL_LEN, num_pages=num_pages, kv_groups=[window(3), window(17), FULL], **limits
    )
    requests = random_requests(rng, 500)
    for request in requests:
        assert harness.offer(request) is None
    most_holes = 0
    while harness.scheduler.has_unfinished():
        harness.step()
        for request in harness.scheduler._held.running:
            most_holes = max(most_holes, *(table.first for table in request.block_tables))
    stats = harness.scheduler.stats()
    assert most_holes > 8
    assert stats.prefix_cache_hits > 50
    assert stats.num_preemptions > 10

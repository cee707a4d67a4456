"""Requests of models with recurrent layers: random workloads, and what a shared prompt costs.

The fake worker's states and snapshots are identities of token sequences, so each wrong restore, each slot that is used
again without being cleared, and each page that is overwritten too early shows.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.row_outputs import RequestFailure
from tests.core.scheduling.fake_worker import FULL, Harness, expect_outputs, recurrent, window
from tests.core.scheduling.test_workloads import MAX_MODEL_LEN, drive, random_requests

GROUPS: dict[str, list[KVGroupSpec]] = {
    "a state alone": [recurrent(1, 4)],
    "a state of three pages alone": [recurrent(3, 8)],
    "keys and values, and a small state": [FULL, recurrent(1, 4)],
    "keys and values, and a large state": [FULL, recurrent(5, 12)],
    "a window, keys and values, and a state": [window(6), FULL, recurrent(2, 8)],
    "a state without snapshots": [FULL, KVGroupSpec("recurrent", [0], page_bytes=1, state_bytes=1)],
}

CASES: list[dict[str, Any]] = [
    {"num_pages": 400, "max_num_seqs": 32, "max_num_batched_tokens": 128},
    {"num_pages": 36, "max_num_seqs": 8, "max_num_batched_tokens": 16},
    {"num_pages": 26, "max_num_seqs": 16, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 3},
    {"num_pages": 26, "max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_chunked_prefill": False},
    {"num_pages": 26, "max_num_seqs": 3, "max_num_batched_tokens": 5, "policy": "priority"},
    {"num_pages": 26, "max_num_seqs": 6, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    {"num_pages": 100, "max_num_seqs": 16, "max_num_batched_tokens": 40, "block_size": 1},
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_outputs_do_not_depend_on_snapshots(groups: str, case: dict[str, Any], depth: int) -> None:
    rng = random.Random(f"{groups} {case} {depth}")
    harness = Harness(max_model_len=MAX_MODEL_LEN, depth=depth, kv_groups=GROUPS[groups], **case)
    requests = random_requests(rng, 120, special=True)
    drive(harness, requests, rng, abort_rate=0.1)
    expect_outputs(harness, requests)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_workloads_do_restore_preempt_and_evict(depth: int) -> None:
    """The one above would prove little otherwise."""
    rng = random.Random(depth)
    harness = Harness(
        max_model_len=MAX_MODEL_LEN, depth=depth, num_pages=26, max_num_seqs=16, kv_groups=[FULL, recurrent(1, 4)]
    )
    requests = random_requests(rng, 500)
    drive(harness, requests, rng)
    expect_outputs(harness, requests)
    assert harness.worker.num_restored > 8
    assert harness.scheduler.stats().num_preemptions > 10
    assert harness.worker.num_snapshots > 1000


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 3),
    num_pages=st.integers(24, 60),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(1, 60),
    threshold=st.sampled_from([0, 1, 7]),
    snapshot_pages=st.integers(1, 30),
    interval=st.sampled_from([4, 8, 20]),
    paged=st.sampled_from([[], [FULL], [window(5)], [window(3), FULL]]),
)
def test_any_limits_keep_the_invariants(
    seed, depth, num_pages, max_num_seqs, budget, threshold, snapshot_pages, interval, paged
):
    rng = random.Random(seed)
    harness = Harness(
        max_model_len=MAX_MODEL_LEN, num_pages=num_pages, depth=depth, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget, long_prefill_token_threshold=threshold,
        kv_groups=[*paged, recurrent(snapshot_pages, interval)],
    )  # fmt: skip
    requests = random_requests(rng, 25)
    pending = list(reversed(requests))
    while pending or harness.scheduler.has_unfinished():
        if pending and rng.random() < 0.7:
            assert harness.offer(pending.pop()) is None
        if rng.random() < 0.05:
            harness.scheduler.reset_prefix_cache(preempt_running=rng.random() < 0.5)
        if rng.random() < 0.05:
            harness.abort(rng.choice(list(harness.streams) or ["nobody"]))
        if harness.scheduler.has_unfinished() or harness.in_flight:
            harness.step()
    harness.run()
    expect_outputs(harness, requests)


def cached_tokens(harness: Harness, name: str) -> int:
    last = harness.streams[name].last
    assert last is not None
    return last.num_cached_tokens


@pytest.mark.parametrize("groups", [[recurrent(2, 8)], [FULL, recurrent(2, 8)], [window(6), FULL, recurrent(2, 8)]])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_continues_from_the_last_snapshot_of_what_it_shares(groups: list[KVGroupSpec], depth: int) -> None:
    harness = Harness(kv_groups=groups, depth=depth)
    shared = list(range(100, 130))
    for name, prompt, expected in (
        ("first", shared, 0),
        ("same", shared, 24),
        ("longer", [*shared, 7, 7, 7], 24),  # the snapshot after 32 tokens holds other tokens
        ("shorter", shared[:24], 16),  # the last token is always computed
        ("other", [5, *shared], 0),
    ):
        harness.add(name, prompt, max_tokens=20)
        harness.run()
        assert cached_tokens(harness, name) == expected
    assert harness.scheduler.stats().prefix_cache_hits == 24 + 24 + 16
    assert harness.worker.num_restored == 3


def test_snapshots_are_taken_of_outputs_too_also_before_their_tokens_are_known() -> None:
    harness = Harness(kv_groups=[FULL, recurrent(1, 8)], depth=3)
    harness.add("first", 6, max_tokens=40)
    harness.run()
    prompt = harness.streams["first"]
    conversation = [*harness.plans[0].admitted[0].token_ids, *prompt.token_ids]
    harness.add("next turn", [*conversation, 1, 2], max_tokens=2)
    harness.run()
    assert cached_tokens(harness, "next turn") == 40


def test_sequences_of_one_prompt_wait_for_each_others_snapshots() -> None:
    """All arrive together; three of four find what the first one computes."""
    harness = Harness(kv_groups=[FULL, recurrent(1, 8)], max_num_batched_tokens=64)
    prompt = list(range(100, 150))
    for name in "abcd":
        harness.add(name, prompt, max_tokens=3)
    harness.run()
    assert [cached_tokens(harness, name) for name in "abcd"] == [0, 48, 48, 48]
    assert harness.worker.num_computed_tokens == 50 + 3 * 2 + 4 * 2


def test_a_pool_that_is_full_takes_no_snapshot_and_preempts_nobody_for_one() -> None:
    """Two requests fill the pool to the last page; the snapshots in between must not cost them anything."""
    groups = [FULL, recurrent(4, 4)]
    for depth in (1, 3):
        harness = Harness(kv_groups=groups, num_pages=24, depth=depth)
        for name in "ab":
            harness.add(name, 8, max_tokens=40)
        harness.run()
        assert harness.scheduler.stats().num_preemptions == 0
        assert harness.worker.num_snapshots > 3


def test_a_snapshot_whose_pages_are_needed_in_the_same_plan_is_not_taken() -> None:
    harness = Harness(kv_groups=[FULL, recurrent(2, 4)], num_pages=5)
    harness.add("a", 4, max_tokens=2)
    harness.add("b", 4, max_tokens=2)
    plan = harness.plan()
    assert plan is not None
    assert [new.slot for new in plan.admitted] == [0, 1]
    assert len(plan.moves_after) == 1
    harness.run()


def test_a_failed_request_leaves_no_snapshot() -> None:
    harness = Harness(kv_groups=[FULL, recurrent(1, 4)])
    prompt = list(range(100, 130))
    harness.add("bad", prompt, max_tokens=9)
    harness.plan()
    result = harness.in_flight[0]
    harness.on_result = lambda result: result
    while not result.token_ids:
        harness.result()
        harness.plan()
        result = harness.in_flight[0]
    result.outputs = [(0, RequestFailure("internal", "logits are not finite"))]
    harness.result()
    harness.add("good", prompt)
    harness.run()
    assert cached_tokens(harness, "good") == 0

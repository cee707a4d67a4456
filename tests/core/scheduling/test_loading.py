"""Requests that wait for pages of a lower tier: the real scheduler, and a host that keeps what the pool evicts.

The fake worker copies what pages hold, so a page that is loaded too late, saved too late, or given away shows.
"""

import random
from typing import Any

import pytest

from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import FinishReason, StepResult
from tests.core.scheduling.fake_worker import FULL, Harness, expect_outputs, recurrent, window
from tests.core.scheduling.host_pages import HostPages
from tests.core.scheduling.test_workloads import MAX_MODEL_LEN, drive, random_requests

GROUPS: dict[str, list[KVGroupSpec]] = {
    "keys and values": [FULL],
    "a window": [window(6), FULL],
    "a state": [FULL, recurrent(2, 8)],
    "a state alone": [recurrent(1, 4)],
}


class SlowMoves:
    """Holds back the reports of moves for some results, as a worker with a slow disk does."""

    def __init__(self, harness: Harness, num_results: int) -> None:
        self._num_results = num_results
        self._held: list[tuple[int, list[int]]] = []
        self._count = 0
        self._harness = harness
        harness.on_result = self.on_result

    def on_result(self, result: StepResult) -> StepResult:
        """Plans without rows wait for the moves of earlier ones."""
        self._count += 1
        waits = not self._harness.plans[-1].slots
        due = [moved for when, moved in self._held if waits or when <= self._count]
        self._held = [each for each in self._held if not waits and each[0] > self._count]
        if self._num_results:
            self._held.append((self._count + self._num_results, result.moved))
        else:
            due.append(result.moved)
        result.moved = [move_id for moved in due for move_id in moved]
        return result


def conversation(harness: Harness, name: str, prompt: list[int], **options: Any) -> int:
    """Runs a request of 4 tokens to its end; returns how much of its prompt was found."""
    harness.add(name, prompt, **options)
    harness.run()
    last = harness.streams[name].last
    assert last is not None
    return last.num_cached_tokens


@pytest.mark.parametrize("slow", [0, 3])
@pytest.mark.parametrize(
    ("groups", "expected"), [([FULL], 28), ([window(6), FULL], 28), ([FULL, recurrent(2, 8)], 24)], ids=str
)
def test_a_request_waits_for_pages_that_the_pool_has_evicted(
    groups: list[KVGroupSpec], expected: int, slow: int
) -> None:
    host = HostPages(64)
    harness = Harness(kv_groups=groups, num_pages=24, lower_tiers=host)
    SlowMoves(harness, slow)
    prompt = list(range(100, 130))
    assert conversation(harness, "first", prompt) == 0
    for name in "xyz":
        conversation(harness, name, 40)
    assert host.num_saved
    assert conversation(harness, "again", prompt) == expected
    loads = [move for plan in harness.plans for move in plan.moves_before if move.source == "host"]
    assert loads
    assert all(move.move_id is not None for move in loads)


def test_others_overtake_a_request_that_waits_and_it_goes_on_when_its_pages_are_there() -> None:
    harness = Harness(num_pages=12, lower_tiers=HostPages(64), depth=1)
    prompt = list(range(100, 116))
    conversation(harness, "first", prompt)
    conversation(harness, "other", 40)
    slow = SlowMoves(harness, 5)
    harness.add("waits", prompt)
    harness.add("overtakes", 4, max_tokens=3)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_pending_tokens == len(prompt)
    assert slow is not None
    harness.run()
    order = [name for name in harness.streams if name in ("waits", "overtakes")]
    assert order == ["waits", "overtakes"]
    assert harness.streams["overtakes"].finish_reason is FinishReason.LENGTH
    last = harness.streams["waits"].last
    assert last is not None
    assert last.num_cached_tokens == 12
    assert not harness.scheduler.stats().num_waiting


def test_with_nothing_to_compute_a_plan_without_rows_waits_for_the_move() -> None:
    harness = Harness(num_pages=12, lower_tiers=HostPages(64))
    prompt = list(range(100, 116))
    conversation(harness, "first", prompt)
    conversation(harness, "other", 40)
    SlowMoves(harness, 100)
    num_before = len(harness.plans)
    assert conversation(harness, "waits", prompt) == 12
    moves, waits, rows, *_ = harness.plans[num_before:]
    assert [len(plan.slots) for plan in (moves, waits, rows)] == [0, 0, 1]
    assert [bool(plan.moves_before) for plan in (moves, waits)] == [True, False]


def test_sequences_of_one_prompt_wait_for_one_load() -> None:
    harness = Harness(num_pages=16, lower_tiers=HostPages(64))
    prompt = list(range(100, 116))
    conversation(harness, "first", prompt)
    conversation(harness, "other", 60)
    num_before = len(harness.plans)
    for name in "abc":
        harness.add(name, prompt)
    harness.run()
    loads = [move for plan in harness.plans[num_before:] for move in plan.moves_before if move.source == "host"]
    assert len(loads) == 1
    for name in "abc":
        last = harness.streams[name].last
        assert last is not None
        assert last.num_cached_tokens == 12


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind() -> None:
    harness = Harness(num_pages=12, lower_tiers=HostPages(64))
    prompt = list(range(100, 116))
    conversation(harness, "first", prompt)
    conversation(harness, "other", 40)
    SlowMoves(harness, 2)
    harness.add("gone", prompt)
    harness.plan()
    assert harness.scheduler.stats().num_waiting == 1
    harness.abort("gone")
    assert not harness.scheduler.has_unfinished()
    harness.scheduler.check_invariants()
    assert conversation(harness, "later", prompt) == 12


def test_a_reset_while_a_load_is_in_flight_keeps_its_content_out_of_the_cache() -> None:
    """As after new weights: what was computed before must not be found."""
    harness = Harness(num_pages=12, lower_tiers=HostPages(64))
    prompt = list(range(100, 116))
    conversation(harness, "first", prompt)
    conversation(harness, "other", 40)
    harness.add("waits", prompt)
    harness.plan()
    harness.scheduler.reset_prefix_cache()
    harness.run()
    last = harness.streams["waits"].last
    assert last is not None
    assert last.num_cached_tokens == 0


def test_what_a_failed_request_computed_is_forgotten_below_too() -> None:
    harness = Harness(num_pages=12, lower_tiers=HostPages(64))
    prompt = list(range(100, 116))
    conversation(harness, "first", prompt)
    for seed in range(7, 400, 10):  # some sequences of such seeds break off
        conversation(harness, f"fill {seed}", 40)
        assert conversation(harness, f"bad {seed}", prompt, seed=seed, max_tokens=20) == 12
        if harness.streams[f"bad {seed}"].finish_reason is FinishReason.ERROR:
            break
    assert harness.streams[f"bad {seed}"].finish_reason is FinishReason.ERROR
    assert conversation(harness, "good", prompt) == 0


CASES: list[dict[str, Any]] = [
    {"num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    {"num_pages": 26, "max_num_seqs": 16, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 3},
    {"num_pages": 26, "max_num_seqs": 3, "max_num_batched_tokens": 48, "policy": "priority"},
]


@pytest.mark.parametrize(("depth", "slow", "num_host_pages"), [(1, 0, 1000), (2, 2, 30), (3, 5, 300)])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_outputs_do_not_depend_on_lower_tiers(
    groups: str, case: dict[str, Any], depth: int, slow: int, num_host_pages: int
) -> None:
    rng = random.Random(f"{groups} {case} {depth}")
    host = HostPages(num_host_pages)
    harness = Harness(
        max_model_len=MAX_MODEL_LEN, depth=depth, kv_groups=GROUPS[groups], lower_tiers=host, **case
    )  # fmt: skip
    SlowMoves(harness, slow)
    requests = random_requests(rng, 120, special=True)
    drive(harness, requests, rng, abort_rate=0.1)
    expect_outputs(harness, requests)
    assert host.num_saved
    loads = [move for plan in harness.plans for move in plan.moves_before if move.source == "host"]
    assert loads or groups == "a state alone"

"""Tokens of a prompt that see each other: a step computes all of a span, and what is shared ends in none."""

import random

import pytest
from msgspec.structs import replace

from quire.core.wire.prefix_spans import PrefixSpan, undivided
from quire.core.wire.protocol import EngineRequest
from tests.core.scheduling.fake_worker import (
    FULL,
    FakeDrafter,
    Harness,
    expect_outputs,
    make_request,
    recurrent,
    window,
)
from tests.core.scheduling.test_workloads import MAX_MODEL_LEN, drive, random_requests

CASES = [
    {"num_pages": 14, "max_num_batched_tokens": 48},
    {"num_pages": 28, "max_num_batched_tokens": 100, "long_prefill_token_threshold": 44},
    {"num_pages": 26, "max_num_batched_tokens": 46, "enable_chunked_prefill": False},
]


@pytest.mark.parametrize(("depth", "drafting"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompts_are_computed_whole_also_after_a_preemption_or_a_crash(case: dict, depth: int, drafting: bool) -> None:
    """Some requests come with the output of an earlier engine, which is no part of their prompts."""
    rng = random.Random(f"{case} {depth}")
    groups = [FULL] if case["num_pages"] == 14 else [FULL, window(9)]
    drafter = FakeDrafter(depth) if drafting else None
    harness = Harness(
        max_model_len=MAX_MODEL_LEN, depth=depth, kv_groups=groups, drafter=drafter, whole_prompts=True, **case
    )
    requests = random_requests(rng, 150)
    drive(harness, requests, rng)
    expect_outputs(harness, requests)
    stats = harness.scheduler.stats()
    assert stats.num_preemptions
    assert not stats.prefix_cache_queries


def with_spans(request: EngineRequest, rng: random.Random) -> EngineRequest:
    """Up to three spans of up to ten tokens, or none; requests with the same tokens may have different ones."""
    spans: list[PrefixSpan] = []
    if rng.random() < 0.6:
        return request
    rng = random.Random(rng.randrange(2))
    place, length = 0, len(request.prompt_token_ids)
    while len(spans) < 3 and (place := place + rng.randrange(6)) < length:
        spans.append((place, min(length, place + rng.randrange(1, 11))))
        place = spans[-1][1]
    return replace(request, prefix_spans=spans)


@pytest.mark.parametrize(
    "groups", [[FULL], [FULL, window(5)], [FULL, recurrent(2, 8)]], ids=["full", "window", "state"]
)
@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 12}, {"long_prefill_token_threshold": 10}], ids=str)
def test_spans_of_a_part_of_the_prompt_are_computed_whole_and_shared(groups: list, limits: dict) -> None:
    """Chunks end before spans or behind them, and the prefix cache finds a span only where all of it is the same."""
    rng = random.Random(f"{len(groups)} {limits}")
    harness = Harness(num_pages=60, max_model_len=MAX_MODEL_LEN, depth=2, kv_groups=groups, **limits)
    requests = [with_spans(request, rng) for request in random_requests(rng, 150)]
    drive(harness, requests, rng)
    expect_outputs(harness, requests)
    assert harness.scheduler.stats().prefix_cache_hits


def test_chunks_end_before_a_span_or_are_all_of_it() -> None:
    spans = [(3, 9), (9, 20)]
    asked = [(0, 3), (0, 4), (0, 9), (3, 2), (3, 6), (3, 9), (9, 5), (20, 4)]
    assert [undivided(spans, start, num, most=8) for start, num in asked] == [3, 3, 9, 6, 6, 6, 0, 4]


def test_a_prefix_that_is_found_ends_in_no_span() -> None:
    harness = Harness(max_num_batched_tokens=40)

    def found(num_tokens: int, *spans: PrefixSpan) -> int:
        name = str(len(harness.streams))
        harness.add(name, list(range(1, num_tokens + 1)), prefix_spans=list(spans), max_tokens=1)
        harness.run()
        assert harness.streams[name].last is not None
        return harness.streams[name].last.num_cached_tokens

    assert found(21, (6, 21)) == 0
    assert found(21, (6, 21)) == 4  # its last token is computed in any case, and so is all of the span
    assert found(25, (6, 21)) == 4
    assert found(25, (6, 21)) == 24
    assert found(25, (6, 20)) == 4
    assert found(25) == 4
    assert found(25, (8, 9)) == 8


def test_output_that_follows_a_prompt_may_be_recomputed_in_chunks() -> None:
    harness = Harness(whole_prompts=True, max_num_batched_tokens=10)
    harness.add("a", 8, output=list(range(1, 30)), max_tokens=40)
    harness.run()
    assert [plan.num_scheduled for plan in harness.plans[:4]] == [[10], [10], [10], [7]]


@pytest.mark.parametrize(
    ("limits", "flag"),
    [({}, "--max-num-batched-tokens is 10"), ({"long_prefill_token_threshold": 10}, "--long-prefill-token-threshold")],
    ids=["a step's budget", "the threshold"],
)
def test_a_span_longer_than_a_step_is_refused(limits: dict, flag: str) -> None:
    limits = {"max_num_batched_tokens": 20 if limits else 10, **limits}
    harness = Harness(whole_prompts=True, **limits)
    failure = harness.offer(make_request("a", 11))
    assert failure is not None
    assert failure.kind == "invalid"
    assert "11 tokens. All tokens of a prompt see each other" in failure.message
    assert flag in failure.message
    harness.add("b", 10)
    harness.run()
    harness = Harness(**limits)
    failure = harness.offer(make_request("a", 30, prefix_spans=[(2, 9), (10, 21)]))
    assert failure is not None
    assert "30 tokens. Its tokens 10 to 20 see each other" in failure.message
    assert flag in failure.message
    harness.add("b", 30, prefix_spans=[(2, 9), (10, 20)])
    harness.run()

"""Models whose prompts' tokens see each other: a step computes a whole prompt, and nothing of it is shared."""

import random

import pytest

from tests.core.scheduling.fake_worker import PROMPT, FakeDrafter, Harness, expect_outputs, make_request, window
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
    groups = [PROMPT] if case["num_pages"] == 14 else [PROMPT, window(9)]
    drafter = FakeDrafter(depth) if drafting else None
    harness = Harness(max_model_len=MAX_MODEL_LEN, depth=depth, kv_groups=groups, drafter=drafter, **case)
    requests = random_requests(rng, 150)
    drive(harness, requests, rng)
    expect_outputs(harness, requests)
    stats = harness.scheduler.stats()
    assert stats.num_preemptions
    assert not stats.prefix_cache_queries


def test_output_that_follows_a_prompt_may_be_recomputed_in_chunks() -> None:
    harness = Harness(kv_groups=[PROMPT], max_num_batched_tokens=10)
    harness.add("a", 8, output=list(range(1, 30)), max_tokens=40)
    harness.run()
    assert [plan.num_scheduled for plan in harness.plans[:4]] == [[10], [10], [10], [7]]


@pytest.mark.parametrize(
    ("limits", "flag"),
    [({}, "--max-num-batched-tokens is 10"), ({"long_prefill_token_threshold": 10}, "--long-prefill-token-threshold")],
    ids=["a step's budget", "the threshold"],
)
def test_a_prompt_longer_than_a_step_is_refused(limits: dict, flag: str) -> None:
    harness = Harness(kv_groups=[PROMPT], **{"max_num_batched_tokens": 20 if limits else 10, **limits})
    failure = harness.offer(make_request("a", 11))
    assert failure is not None
    assert failure.kind == "invalid"
    assert "11 tokens" in failure.message
    assert flag in failure.message
    harness.add("b", 10)
    harness.run()

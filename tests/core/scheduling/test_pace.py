"""A long prompt slows running streams down by a known factor at most. Costs are of a clock that the test turns."""

import pytest

from quire.core.wire.protocol import StepPlan
from tests.core.scheduling.fake_worker import Harness, make_request

STEP, TOKEN = 1.0, 0.05
"""Seconds of each step, and of each prompt token in it."""


def cost_of(plan: StepPlan) -> float:
    return STEP + TOKEN * sum(count for count in plan.num_scheduled if count > 1)


def run_beside(harness: Harness, num_steps: int) -> list[float]:
    """Runs steps, each of which takes what it costs; returns the costs."""
    costs = []
    for _ in range(num_steps):
        plan = harness.plan()
        assert plan is not None
        costs.append(cost_of(plan))
        harness.clock.now += costs[-1]
        harness.result()
    return costs


def harness_with_streams(**limits: float) -> Harness:
    harness = Harness(num_pages=4000, max_model_len=8000, max_num_batched_tokens=512, **limits)
    for index in range(4):
        harness.add(f"stream{index}", 40, max_tokens=2000)
    run_beside(harness, 20)
    return harness


@pytest.mark.parametrize("slowdown", [2.0, 3.0])
def test_streams_slow_down_by_the_factor_beside_a_long_prompt(slowdown: float) -> None:
    harness = harness_with_streams(long_prefill_slowdown=slowdown)
    harness.add("long", 3000, max_tokens=4)
    costs = run_beside(harness, 60)
    assert max(costs) <= slowdown * STEP * 1.01
    assert all(len(harness.streams[f"stream{index}"].token_ids) == 80 for index in range(4)), "one each step"
    done = sum(count for plan in harness.plans[-60:] for count in plan.num_scheduled if count > 1)
    assert done >= 0.9 * 60 * (slowdown - 1) * STEP / TOKEN, "and the prompt gets the rest"


def test_without_a_factor_a_step_is_as_full_as_it_may_be() -> None:
    harness = harness_with_streams(long_prefill_slowdown=0.0)
    harness.add("long", 3000, max_tokens=4)
    assert max(run_beside(harness, 3)) > 20 * STEP


def test_a_prompt_that_runs_alone_has_whole_steps() -> None:
    harness = Harness(num_pages=4000, max_model_len=8000, max_num_batched_tokens=512, long_prefill_slowdown=2.0)
    harness.add("first", 40, max_tokens=20)
    run_beside(harness, 20)
    assert not harness.scheduler.has_unfinished()
    harness.add("long", 3000, max_tokens=4)
    run_beside(harness, 2)
    assert [sum(plan.num_scheduled) for plan in harness.plans[-2:]] == [512, 512]


def test_short_prompts_are_not_held_back() -> None:
    harness = harness_with_streams(long_prefill_slowdown=2.0)
    harness.add("long", 3000, max_tokens=4)
    run_beside(harness, 5)
    harness.offer(make_request("short", 300, max_tokens=2))
    run_beside(harness, 2)
    assert len(harness.streams["short"].token_ids) > 0

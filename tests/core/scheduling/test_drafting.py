"""How many drafts requests get: in a simulated engine with a clock of its own, drafts never make it slower."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from quire.core.config.resolved import SchedulerLimits
from quire.core.config.speculative import Speculation
from quire.core.scheduling.draft_costs import DraftCosts
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.protocol import StepPlan, StepResult
from tests.core.scheduling.fake_worker import FULL, Clock, make_request


@dataclass(frozen=True)
class Machine:
    """The times of a simulated engine, in seconds."""

    step: float  # that each step takes
    token: float  # that each token adds
    host: float = 0.0004  # between a result and a plan that was not made ahead
    guess: float = 0.0  # to propose drafts for a row


SMALL_BATCHES = Machine(step=0.010, token=0.0001)
LARGE_BATCHES = Machine(step=0.002, token=0.0010)
SLOW_DRAFTS = Machine(step=0.010, token=0.0001, guess=0.004)


def simulate(
    machine: Machine,
    num_rows: int,
    speculation: Speculation | None,
    *,
    right: float = 0.0,
    supply: float = 1.0,
    num_tokens: int = 300,
    depth: int = 2,
) -> tuple[float, list[int]]:
    """Returns the seconds for all requests' tokens, and the limits that each plan's rows had."""
    rng, clock, drafts = random.Random(num_rows), Clock(), 8
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=4096, block_size=16),
        kv_groups=[FULL],
        num_pages=4096,
        max_model_len=1000,
        eos_token_ids=(),
        clock=clock,
        speculation=speculation,
    )
    for number in range(num_rows):
        assert scheduler.add(make_request(f"r{number}", 4, max_tokens=num_tokens)) == []
    flying: deque[tuple[StepPlan, float]] = deque()
    limits: list[int] = []
    begun = free_at = clock.now
    num_steps = 0
    while scheduler.has_unfinished():
        while len(flying) < depth and (plan := scheduler.schedule()) is not None:
            started = max(free_at, clock.now + (0.0 if flying else machine.host))
            asked = sum(map(bool, plan.draft_limits or ()))
            free_at = started + machine.step + machine.token * sum(plan.num_scheduled) + machine.guess * asked
            flying.append((plan, free_at))
            limits += plan.draft_limits or []
        plan, clock.now = flying.popleft()
        tokens = []
        for wanted in plan.num_wanted:
            if wanted:
                accepted = 0
                while accepted < wanted - 1 and rng.random() < right:
                    accepted += 1
                tokens.append([7] * (1 + accepted))
        given = plan.draft_limits or [0] * len(tokens)
        in_burst = num_steps % 40 < 40 * supply
        num_steps += 1
        num_drafts = [min(limit, drafts) if in_burst else 0 for limit in given]
        scheduler.update(StepResult(plan.step_id, tokens, num_drafts=num_drafts if any(num_drafts) else []))
        scheduler.check_invariants()
    return clock.now - begun, limits


@pytest.mark.parametrize(
    ("machine", "num_rows", "right"),
    [
        (SMALL_BATCHES, 1, 0.0),
        (SMALL_BATCHES, 32, 0.0),
        (SMALL_BATCHES, 32, 0.3),
        (LARGE_BATCHES, 1, 0.3),
        (LARGE_BATCHES, 4, 0.0),
        (LARGE_BATCHES, 4, 0.6),
        (LARGE_BATCHES, 32, 0.0),
        (LARGE_BATCHES, 32, 0.9),
        (SLOW_DRAFTS, 1, 0.3),
        (SLOW_DRAFTS, 4, 0.0),
    ],
)
def test_it_is_never_slower(machine: Machine, num_rows: int, right: float) -> None:
    """What is learnt first costs something, too."""
    plain, _ = simulate(machine, num_rows, None)
    drafted, _ = simulate(machine, num_rows, Speculation(method="ngram", num_tokens=4), right=right)
    assert plain / drafted >= 0.98


def test_it_is_never_slower_in_the_long_run() -> None:
    """Where drafts for all rows would take ten times a step's own time."""
    plain, _ = simulate(SLOW_DRAFTS, 32, None, num_tokens=600)
    drafted, _ = simulate(SLOW_DRAFTS, 32, Speculation(method="ngram", num_tokens=4), right=0.9, num_tokens=600)
    assert plain / drafted >= 0.98


def test_first_steps_with_drafts_decide_little() -> None:
    """They meet each number of tokens for the first time, and take six times as long as later ones."""
    costs = DraftCosts()
    for _ in range(3):
        costs.add_plain(1, 0.001)
    for num_drafts in (1, 1, 8, 3, 3, 8):
        costs.add(1, num_drafts, 1, 0.006)
        assert costs.of(1).of_step(1, 5, 1) < 3.3
    for _ in range(200):
        costs.add(1, 4, 1, 0.006)
    assert costs.of(1).of_step(1, 4, 1) == pytest.approx(6, abs=0.1)


def test_right_drafts_pay_where_a_step_costs_more_than_its_tokens() -> None:
    speculation = Speculation(method="ngram", num_tokens=4)
    plain, _ = simulate(SMALL_BATCHES, 1, None)
    drafted, limits = simulate(SMALL_BATCHES, 1, speculation, right=0.8)
    assert plain / drafted > 2.7  # at most 3.36 tokens in 1.09 times a step, after what is learnt first
    assert max(limits) == 4
    plain, _ = simulate(SMALL_BATCHES, 4, None)
    drafted, _ = simulate(SMALL_BATCHES, 4, speculation, right=0.8)
    assert plain / drafted > 2.1


def test_scarce_drafts_are_taken_when_they_come() -> None:
    """N-grams that are found in some steps of forty."""
    plain, _ = simulate(SMALL_BATCHES, 1, None)
    drafted, _ = simulate(SMALL_BATCHES, 1, Speculation(method="ngram", num_tokens=4), right=0.9, supply=0.1)
    assert plain / drafted > 1.15


def test_sizes_of_batches_limit_drafts() -> None:
    speculation = Speculation(method="ngram", num_tokens=4, by_batch_size=[(1, 1, 2), (2, 8, 0)])
    _, alone = simulate(SMALL_BATCHES, 1, speculation, right=0.9)
    _, four = simulate(SMALL_BATCHES, 4, speculation, right=0.9)
    assert (max(alone), max(four, default=0)) == (2, 0)


def test_without_adaptation_all_drafts_are_asked_for() -> None:
    speculation = Speculation(method="ngram", num_tokens=4, is_adaptive=False)
    _, limits = simulate(LARGE_BATCHES, 4, speculation, num_tokens=20)
    assert set(limits) == {4}

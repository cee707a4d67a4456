"""Policies order requests; priorities age, and the sequences of one request take their turns among others."""

from quire.core.config.resolved import SchedulerLimits
from quire.core.scheduling.order import Turns, policy_of
from tests.core.scheduling.fake_worker import make_request

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 10}


def test_fcfs_ranks_by_arrival_alone() -> None:
    key_of = policy_of(SchedulerLimits(**LIMITS))
    assert key_of(make_request("a", 1, priority=9), 0, 5.0) < key_of(make_request("b", 1, priority=0), 1, 1.0)


def test_priority_ranks_low_values_first_and_ties_by_arrival() -> None:
    key_of = policy_of(SchedulerLimits(policy="priority", **LIMITS))
    late_urgent, early, late = (
        key_of(make_request("a", 1, priority=-1), 7, 1e6),
        key_of(make_request("b", 1, priority=3), 1, 0.0),
        key_of(make_request("c", 1, priority=3), 2, 0.0),
    )
    assert late_urgent < early < late


def test_waiting_is_worth_levels_of_priority() -> None:
    key_of = policy_of(SchedulerLimits(policy="priority", priority_aging_seconds=60.0, **LIMITS))
    waits = key_of(make_request("waits", 1, priority=2), 0, 0.0)
    assert key_of(make_request("soon", 1, priority=0), 1, 119.0) < waits
    assert key_of(make_request("late", 1, priority=0), 2, 121.0) > waits
    assert key_of(make_request("low", 1, priority=2**62 + 1), 3, 0.0) > key_of(
        make_request("also low", 1, priority=2**62), 4, 0.0
    )


def test_turns_of_single_requests_are_their_order() -> None:
    turns = Turns(num_slots=8)
    taken = [next(iter(turns.take(1))) for _ in range(4)]
    assert taken == sorted(set(taken))
    turns.on_admitted(taken[1])
    assert next(iter(turns.take(1))) > taken[-1]


def test_a_request_comes_before_sequences_that_would_still_wait() -> None:
    turns = Turns(num_slots=8)
    many = turns.take(1000)
    for turn in many[:8]:
        turns.on_admitted(turn)
    [late] = turns.take(1)
    assert many[7] <= late < many[8] - 10

"""Rules for restarting an engine."""

import pytest

from quire.core.engine.restart_policy import LONGEST_PAUSE_SECONDS, MAX_BLAMED_STARTS, Fault, RestartPolicy


def end(
    restarts: RestartPolicy,
    *,
    ready: float | None = 1.0,
    work: bool = False,
    output: bool = False,
    fault: Fault = "own",
) -> None:
    restarts.add(ready_seconds=ready, had_work=work, had_output=output, fault=fault)


def test_failed_starts_are_given_up_and_one_success_refutes_them() -> None:
    restarts = RestartPolicy(max_failed_starts=2)
    for _ in range(2):
        end(restarts, ready=None)
    end(restarts)
    for _ in range(2):
        end(restarts, ready=None)
        assert restarts.why_hopeless is None
    end(restarts, ready=None)
    assert "3 starts in a row" in (restarts.why_hopeless or "")


def test_ends_that_are_known_to_be_the_fault_of_others_are_never_given_up() -> None:
    restarts = RestartPolicy(max_failed_starts=0, max_fruitless_runs=0)
    for _ in range(1000):
        end(restarts, ready=None, fault="elsewhere")
        end(restarts, work=True, fault="elsewhere")
    assert restarts.why_hopeless is None
    assert restarts.pause_seconds == LONGEST_PAUSE_SECONDS
    end(restarts, ready=None)
    assert "1 starts in a row failed." in (restarts.why_hopeless or "")


def test_engines_that_blame_their_peers_are_given_up_later_unless_a_peer_is_missing() -> None:
    restarts = RestartPolicy(max_failed_starts=0)
    for _ in range(2):
        for _ in range(MAX_BLAMED_STARTS):
            end(restarts, ready=None, fault="peer")
            assert restarts.why_hopeless is None
        restarts.acquit()
    for _ in range(MAX_BLAMED_STARTS + 1):
        end(restarts, ready=None, fault="peer")
    assert "because of others" in (restarts.why_hopeless or "")


def test_fruitless_runs_are_given_up_and_output_refutes_them() -> None:
    restarts = RestartPolicy(max_fruitless_runs=2)
    for _ in range(2):
        end(restarts, work=True)
    end(restarts, work=True, output=True)
    for _ in range(2):
        end(restarts, work=True)
        end(restarts, ready=None)  # neither this
        end(restarts)  # nor an idle life says that requests get output
        assert restarts.why_hopeless is None
    end(restarts, work=True)
    assert "3 engines in a row" in (restarts.why_hopeless or "")


def test_idle_ends_are_never_given_up_but_do_not_spin() -> None:
    restarts = RestartPolicy()
    pauses = []
    for _ in range(1000):
        end(restarts)
        pauses.append(restarts.pause_seconds)
    assert restarts.why_hopeless is None
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert set(pauses[6:]) == {LONGEST_PAUSE_SECONDS}


def test_an_engine_that_ran_for_long_is_replaced_at_once() -> None:
    restarts = RestartPolicy()
    assert restarts.pause_seconds == 0
    end(restarts)
    end(restarts, ready=3600.0)
    assert restarts.pause_seconds == 0
    end(restarts)
    assert restarts.pause_seconds == pytest.approx(0.1)


def test_a_reason_that_lasts_is_given_up_after_some_time_and_other_failures_between_do_not_count_for_it() -> None:
    now = [0.0]
    restarts = RestartPolicy(max_failed_starts=2, clock=lambda: now[0])

    def fail(fault: Fault, seconds: float) -> str | None:
        end(restarts, ready=None, fault=fault)
        now[0] += seconds
        return restarts.why_hopeless

    assert [fail(fault, 50.0) for fault in ("setting", "setting", "own")] == [None] * 3
    assert [fail("setting", 5.0) for _ in range(12)] == [None] * 12, "storage may come back"
    assert restarts.pause_seconds == LONGEST_PAUSE_SECONDS
    assert "13 starts in a row failed for such a reason, in 60 s" in (fail("setting", 0.0) or "")
    end(restarts)
    assert restarts.why_hopeless is None


def test_a_reason_that_lasts_is_tried_three_times_however_long_a_start_takes() -> None:
    now = [0.0]
    restarts = RestartPolicy(clock=lambda: now[0], lost_weights_seconds=0.0)
    for _ in range(2):
        end(restarts, ready=None, fault="setting")
        now[0] += 1000.0
        assert restarts.why_hopeless is None
    end(restarts, ready=None, fault="setting")
    assert "QUIRE_LOST_WEIGHTS_TIMEOUT_S allows more time" in (restarts.why_hopeless or "")

"""When the plans of an engine run, if all engines take their steps together."""

from collections import deque
from collections.abc import Callable

from quire.core.wire.protocol import StepPlan, WorkerCall
from quire.executor.processes.lockstep_plans import LockstepPlans


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, [], [], [0], [0], [7], [1], [])


class Ring:
    """An engine's plans and calls; the next ones of `later` arrive when a worker sleeps."""

    def __init__(self, *now: StepPlan | WorkerCall, later: tuple[StepPlan | WorkerCall, ...] = ()) -> None:
        self._now, self._later = deque(now), deque(later)
        self.on_sleep: Callable[[], None] = lambda: None

    def poll(self) -> StepPlan | WorkerCall | None:
        return self._now.popleft() if self._now else None

    def sleep(self) -> None:
        self.on_sleep()
        if self._later:
            self._now.append(self._later.popleft())

    def wake(self) -> None: ...


class Peers:
    """Ranks of other engines. `leader` says in which steps the first rank of this one's engine has a plan."""

    def __init__(self, leader: Callable[[int], bool] = bool, *, called: bool = False) -> None:
        self._leader = leader
        self.is_called = called
        self.begun: list[int] = []

    def listen(self, wake: Callable[[], None]) -> None: ...

    def begin(self, num_tokens: int) -> bool:
        self.is_called = False
        self.begun.append(num_tokens)
        return self._leader(num_tokens)


def plans_of(ring: Ring, peers: Peers) -> tuple[LockstepPlans, list[int]]:
    """The plans, and how many steps had begun whenever the worker accompanied others."""
    accompanied: list[int] = []
    return LockstepPlans(ring, peers, lambda: accompanied.append(len(peers.begun))), accompanied


def test_a_plan_begins_a_step_and_nothing_begins_none() -> None:
    peers = Peers()
    plans, accompanied = plans_of(Ring(plan(1), plan(2)), peers)
    assert [plans.wait(), plans.wait(), plans.poll()] == [plan(1), plan(2), None]
    assert (peers.begun, accompanied) == ([7, 7], [])


def test_a_worker_without_a_plan_accompanies_the_steps_it_is_called_for() -> None:
    ring, peers = Ring(), Peers(called=True)
    plans, accompanied = plans_of(ring, peers)
    assert [plans.poll(), plans.poll()] == [None, None]
    assert (peers.begun, accompanied) == ([0], [1])
    calls = iter([True, True])

    def call() -> None:
        peers.is_called = next(calls, False)
        if not peers.is_called:
            ring._now.append(plan(1))

    ring.on_sleep = call
    assert plans.wait() == plan(1)
    assert (peers.begun, accompanied) == ([0, 0, 0, 7], [1, 2, 3])


def test_a_plan_that_the_first_rank_has_not_seen_runs_in_a_later_step() -> None:
    peers = Peers(lambda _: len(peers.begun) > 2)
    plans, accompanied = plans_of(Ring(plan(1)), peers)
    assert plans.wait() == plan(1)
    assert (peers.begun, accompanied) == ([7, 7, 7], [1, 2])


def test_a_plan_that_only_the_first_rank_has_seen_is_waited_for() -> None:
    """Calls come before it as in the engine's order, and it begins no other step."""
    call = WorkerCall(1, "name", b"")
    peers = Peers(lambda _: True, called=True)
    plans, accompanied = plans_of(Ring(later=(call, plan(1), plan(2))), peers)
    assert [plans.wait(), plans.wait()] == [call, plan(1)]
    assert (peers.begun, accompanied) == ([0], [])
    assert plans.wait() == plan(2)
    assert peers.begun == [0, 7]


def test_a_plan_without_rows_is_no_step_of_the_others() -> None:
    """It moves pages. If a step has begun, that is the step of the next plan with rows."""
    peers, moves = Peers(), StepPlan(1, [], [], [], [], [], [], [])
    plans, accompanied = plans_of(Ring(moves, plan(2)), peers)
    assert [plans.wait(), plans.wait()] == [moves, plan(2)]
    assert (peers.begun, accompanied) == ([7], [])
    peers = Peers(lambda _: True, called=True)
    plans, accompanied = plans_of(Ring(later=(moves, plan(2))), peers)
    assert [plans.poll(), plans.wait(), plans.wait()] == [None, moves, plan(2)]
    assert (peers.begun, accompanied) == ([0], [])

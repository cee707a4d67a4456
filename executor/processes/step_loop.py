"""The loop of every worker: plans in, results out, and the device kept busy in between. Knows no device."""

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from quire.core.wire.protocol import StepPlan, StepResult

POLL_SECONDS = 50e-6


class LaunchedStep(Protocol):
    """A step that a worker's device was told to do."""

    @property
    def step_id(self) -> int:
        """The plan's."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the device has done it; always true where the launch itself does it."""
        ...


Step = TypeVar("Step", bound=LaunchedStep)


class StepWorker(Protocol[Step]):
    """What the loop needs of a worker; see `quire.executor.worker.Worker`."""

    def launch(self, plan: StepPlan) -> Step:
        """Starts a step, without waiting for it."""
        ...

    def collect(self, step: Step) -> StepResult:
        """What came of a step; the oldest first."""
        ...


class Plans(Protocol):
    """Where plans come from. Both methods raise what ends the loop."""

    def wait(self) -> StepPlan:
        """The next plan, as soon as there is one."""
        ...

    def poll(self) -> StepPlan | None:
        """The next plan; None if there is none yet."""
        ...


class StepLoop(Generic[Step]):
    """Launches each plan as soon as it is there, and collects each step as soon as it is done.

    So the inputs of a step are built while the device works on the step before. Where a launch does the whole step,
    each is collected before the next plan is looked for.

    Args:
        report: takes each result, in the order of plans.

    Attributes:
        step_id: of the step in hand, for the message when it fails.
    """

    def __init__(self, worker: StepWorker[Step], plans: Plans, report: Callable[[StepResult], None]) -> None:
        self._worker = worker
        self._plans = plans
        self._report = report
        self.step_id = 0

    def run(self) -> None:
        """Until `plans` or a step raises."""
        launched: deque[Step] = deque()
        while True:
            plan = self._plans.poll() if launched else self._plans.wait()
            if plan is not None:
                self.step_id = plan.step_id
                launched.append(self._worker.launch(plan))
            elif not launched[0].is_done:
                time.sleep(POLL_SECONDS)
            while launched and launched[0].is_done:
                self.step_id = launched[0].step_id
                self._report(self._worker.collect(launched.popleft()))

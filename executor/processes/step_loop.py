"""The loop of every worker: launches plans and collects results so that the device stays busy. Knows no device."""

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from quire.core.wire.protocol import StepPlan, StepResult

POLL_SECONDS = 50e-6


class LaunchedStep(Protocol):
    """A step that a worker has launched on its device."""

    @property
    def step_id(self) -> int:
        """The plan's."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the device has done the step; always true if the launch itself does it."""
        ...


Step = TypeVar("Step", bound=LaunchedStep)


class StepWorker(Protocol[Step]):
    """The interface of a worker to the loop; see `quire.executor.worker.Worker`."""

    def launch(self, plan: StepPlan) -> Step:
        """Starts a step, without waiting for it."""
        ...

    def collect(self, step: Step) -> StepResult:
        """The result of a step; steps are collected in the order of their launches."""
        ...


class Plans(Protocol):
    """The source of plans. Both methods raise the exception that ends the loop."""

    def wait(self) -> StepPlan:
        """The next plan, as soon as there is one."""
        ...

    def poll(self) -> StepPlan | None:
        """The next plan; None if there is none yet."""
        ...


class StepLoop(Generic[Step]):
    """Launches each plan as soon as it arrives, and collects each step as soon as it is done.

    So the inputs of a step are built while the device works on the step before. If a launch does the whole step, each
    step is collected before the next plan is looked for.

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
        """Runs until `plans` or a step raises."""
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

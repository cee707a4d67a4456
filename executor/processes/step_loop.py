"""The loop of every worker: launches plans and collects results so that the device stays busy. Knows no device."""

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from quire.core.wire.protocol import StepPlan, StepResult, WorkerAnswer, WorkerCall

POLL_SECONDS = 50e-6


class LaunchedStep(Protocol):
    """A step that a worker has launched on its device."""

    @property
    def step_id(self) -> int:
        """The plan's id."""
        ...

    @property
    def is_done(self) -> bool:
        """True if the device has finished the step; always True if the launch itself runs it."""
        ...


Step = TypeVar("Step", bound=LaunchedStep)


class StepWorker(Protocol[Step]):
    """The interface of a worker to the loop; see `quire.executor.worker.Worker`."""

    def launch(self, plan: StepPlan) -> Step:
        """Starts a step, without waiting for it."""
        ...

    def collect(self, step: Step) -> StepResult:
        """Returns the result of a step; steps are collected in the order of their launches."""
        ...

    def call(self, call: WorkerCall, answer: Callable[[WorkerAnswer], None]) -> None:
        """Runs a call between steps. The answer may come later, from another thread; a failure is part of it."""
        ...


class Plans(Protocol):
    """The source of plans and calls, in order. Both methods raise the exception that ends the loop."""

    def wait(self) -> StepPlan | WorkerCall:
        """Returns the next message, once there is one."""
        ...

    def poll(self) -> StepPlan | WorkerCall | None:
        """Returns the next message; None if there is none yet."""
        ...


class StepLoop(Generic[Step]):
    """Launches each plan as soon as it arrives, and collects each step as soon as it is done.

    So the inputs of a step are built while the device runs the previous step. If a launch runs the whole step, each
    step is collected before the next plan is polled. A call waits until the steps before it are collected.

    Args:
        report: takes each result, in the order of plans.
        answer: takes the answer to each call, from any thread.

    Attributes:
        step_id: of the step in hand, for the message when it fails.
    """

    def __init__(
        self,
        worker: StepWorker[Step],
        plans: Plans,
        report: Callable[[StepResult], None],
        answer: Callable[[WorkerAnswer], None],
    ) -> None:
        self._worker = worker
        self._plans = plans
        self._report = report
        self._answer = answer
        self._launched: deque[Step] = deque()
        self.step_id = 0

    def run(self) -> None:
        """Runs until `plans` or a step raises."""
        launched = self._launched
        while True:
            plan = self._plans.poll() if launched else self._plans.wait()
            if isinstance(plan, WorkerCall):
                self._call(plan)
            elif plan is not None:
                self.step_id = plan.step_id
                launched.append(self._worker.launch(plan))
            elif not launched[0].is_done:
                time.sleep(POLL_SECONDS)
            while launched and launched[0].is_done:
                self._collect()

    def _call(self, call: WorkerCall) -> None:
        while self._launched:
            self._collect()
        self._worker.call(call, self._answer)

    def _collect(self) -> None:
        step = self._launched.popleft()
        self.step_id = step.step_id
        self._report(self._worker.collect(step))

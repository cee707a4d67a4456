"""The engine loop: keeps the executor fed with plans and turns its results into deltas.

Plans are made ahead: as many are in flight as the executor is deep, so with depth 2 step N+1 is planned and sent before
step N's tokens are back, and scheduling hides behind the running step. The scheduler knows which steps are in flight.
The engine loop must not know about sockets, text or tensors.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.core.engine.adapter_loads import AdapterLoads
from quire.core.engine.step_watch import TICK_SECONDS, StepWatch
from quire.core.flight.recorder import NO_RECORDER, Recorder
from quire.core.scheduling.scheduler import Scheduler
from quire.core.trace import Timeline
from quire.core.wire.protocol import EngineReady, RequestDelta, StepPlan, StepResult

QUIET_SECONDS = 1.0
HUNG_SECONDS = 10.0
"""A step in flight for longer than this counts as hung when the engine is closed."""


class Executor(Protocol):
    """Runs steps on one or more workers. Implemented in `quire.executor`.

    Attributes:
        depth: steps to keep in flight, so that no worker waits for the next; with 1, each result is awaited first.
        pids: processes on this host that run steps.
        stopped: those that a signal has stopped, by name.
    """

    depth: int

    @property
    def pids(self) -> list[int]: ...

    @property
    def stopped(self) -> list[str]: ...

    @property
    def waits_for(self) -> str | None:
        """The resource outside this host for which `start` waits, such as a node; None if it waits for nothing."""

    async def prepare(self) -> None:
        """Does what can be done ahead of `start` without the device and the model, such as imports."""

    async def start(self) -> EngineReady:
        """Loads the model on every rank. Raises ModelLoadError when the checkpoint is at fault."""

    def submit(self, plan: StepPlan) -> None:
        """Queues a plan and never blocks. Plans run strictly in order."""

    async def next_result(self) -> StepResult:
        """The oldest result that has not been taken. Raises EngineError when no result will come."""

    def when_failed(self, call: Callable[[], None]) -> None:
        """Calls `call` once `next_result` will raise, or at once if it would raise now. Replaces an earlier `call`."""

    async def call(self, name: str, payload: bytes) -> list[bytes]:
        """Runs a `WorkerCall` on every worker between steps, and returns the answers by rank.

        Raises WorkerCallError when a worker fails at it, or another EngineError when one ends.
        """

    async def close(self, *, hung: bool) -> None:
        """Ends workers and frees what they held. Idempotent.

        Args:
            hung: a step takes suspiciously long, so write the workers' stacks to stderr first.
        """


class Engine:
    """Feeds the executor with the scheduler's plans, and the scheduler with the executor's results.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        watch: measures steps, and notices those that hang.
        on_deltas: called after each step with the step's deltas.
        timeline: records how long each part of the loop takes.
        recorder: records plans, results and ends.

    Attributes:
        adapters: the loads of adapters.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        watch: StepWatch,
        on_deltas: Callable[[list[RequestDelta]], None],
        timeline: Timeline,
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._watch = watch
        self._on_deltas = on_deltas
        self._timeline = timeline
        self._recorder = recorder
        self._has_work = asyncio.Event()
        self.adapters = AdapterLoads(scheduler, executor.call, self._on_adapter)

    def fill(self) -> None:
        """Plans steps until the pipeline is full. Call it after anything that may have made work."""
        while self._scheduler.num_in_flight < self._executor.depth:
            with self._timeline.span("plan"):
                plan = self._scheduler.schedule()
            if plan is None:
                break
            self._recorder.add_plan(plan, self._scheduler.admitted_ids(plan))
            with self._timeline.span("send"):
                self._watch.add(plan)
                self._executor.submit(plan)
        self.adapters.start()
        if self._scheduler.num_in_flight:
            self._has_work.set()

    def _on_adapter(self, deltas: list[RequestDelta]) -> None:
        """Takes in the end of a load, after which requests may run."""
        self._recorder.add_deltas(deltas)
        if deltas:
            self._on_deltas(deltas)
        self.fill()

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            EngineError: a worker died or a step hung; the process should end and be restarted.
        """
        tasks = [asyncio.create_task(self._step()), asyncio.create_task(self._look_at_steps())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _step(self) -> None:
        while True:
            if not self._scheduler.num_in_flight:
                await self._idle()
            with self._timeline.span("wait"):
                result = await self._executor.next_result()
            self._timeline.add(result.spans)
            self._recorder.add_result(result)
            with self._timeline.span("update"):
                deltas = self._scheduler.update(result)
            self._watch.complete()
            self._recorder.add_deltas(deltas)
            with self._timeline.span("emit"):
                self._on_deltas(deltas)
            self.fill()

    async def _look_at_steps(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._watch.look()

    async def _idle(self) -> None:
        """Waits for work, or for a failure of the workers, so that it is noticed before the next request comes.

        After an idle second, counts every page, so that a leak shows here and not weeks later.
        """
        self._has_work.clear()
        self._executor.when_failed(self._has_work.set)
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                await self._has_work.wait()
        except TimeoutError:
            self._scheduler.check_invariants()
            await self._has_work.wait()

    @property
    def is_hung(self) -> bool:
        """True if a step was found to hang, or has been in flight for longer than `HUNG_SECONDS`."""
        return self._watch.is_hung or self._scheduler.seconds_in_flight > HUNG_SECONDS

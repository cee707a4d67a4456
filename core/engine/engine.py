"""The engine loop: keeps the executor fed with plans and turns its results into deltas.

Plans are made ahead: up to `depth` are in flight, so with depth 2 step N+1 is planned and sent before step N's tokens
are back, and scheduling hides behind the running step. It must not know about sockets, text or tensors.
"""

import asyncio
import faulthandler
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import EngineError
from quire.core.scheduling.scheduler import Scheduler
from quire.core.trace import Timeline
from quire.core.wire.protocol import EngineReady, RequestDelta, StepPlan, StepResult

QUIET_SECONDS = 1.0


class Executor(Protocol):
    """Gets steps done on one or more workers. Implemented in `quire.executor`."""

    async def start(self) -> EngineReady:
        """Loads the model on every rank. Raises ModelLoadError when the checkpoint is at fault."""

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queues a plan. Plans run strictly in order; the future fails with EngineError when a worker dies."""

    async def close(self) -> None:
        """Ends workers and frees what they held. Idempotent."""


class Engine:
    """Owns the pipeline of in-flight steps.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        depth: steps in flight at most; 1 waits for each result before planning the next step.
        step_timeout_seconds: a step that takes longer counts as a hung worker.
        on_deltas: called after each step with what it did for its requests.
        timeline: is told what takes how long.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int,
        step_timeout_seconds: float,
        on_deltas: Callable[[list[RequestDelta]], None],
        timeline: Timeline,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._step_timeout_seconds = step_timeout_seconds
        self._on_deltas = on_deltas
        self._timeline = timeline
        self._in_flight: deque[asyncio.Future[StepResult]] = deque()
        self._has_work = asyncio.Event()

    def fill(self) -> None:
        """Plans as many steps as the pipeline has room for. Call after anything that may have made work."""
        while len(self._in_flight) < self._depth:
            with self._timeline.span("plan"):
                plan = self._scheduler.schedule()
            if plan is None:
                break
            with self._timeline.span("send"):
                self._in_flight.append(self._executor.submit(plan))
        if self._in_flight:
            self._has_work.set()

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            EngineError: a worker died or a step hung; the process should end and be restarted.
        """
        while True:
            if not self._in_flight:
                await self._idle()
            with self._timeline.span("wait"):
                result = await self._oldest_result()
            self._timeline.add(result.spans)
            with self._timeline.span("update"):
                deltas = self._scheduler.update(result)
            with self._timeline.span("emit"):
                self._on_deltas(deltas)
            self.fill()

    async def _idle(self) -> None:
        """Waits for work. After a quiet second, every page is counted: a leak shows here and not weeks later."""
        self._has_work.clear()
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                await self._has_work.wait()
        except TimeoutError:
            self._scheduler.check_invariants()
            await self._has_work.wait()

    async def _oldest_result(self) -> StepResult:
        future = self._in_flight.popleft()
        try:
            async with asyncio.timeout(self._step_timeout_seconds):
                return await future
        except TimeoutError:
            faulthandler.dump_traceback()  # where every thread of this process is stuck
            raise EngineError(
                f"A step made no progress for {self._step_timeout_seconds:.0f} s; "
                "QUIRE_ENGINE_ITERATION_TIMEOUT_S raises the limit."
            ) from None

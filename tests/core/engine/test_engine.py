"""The engine loop with an executor that answers only when the test says so."""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.config.resolved import SchedulerLimits
from quire.core.engine.engine import Engine
from quire.core.engine.step_times import StepTimes
from quire.core.engine.step_watch import StepWatch
from quire.core.errors import EngineError
from quire.core.scheduling.scheduler import Scheduler
from quire.core.trace import Timeline
from quire.core.wire.protocol import EngineReady, RequestDelta, StepPlan, StepResult
from quire.executor.processes.result_inbox import ResultInbox
from tests.core.scheduling.fake_worker import FULL, Clock, make_request


class ManualExecutor:
    """Keeps plans until `answer` is called."""

    waits_for = None

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.pids: list[int] = []
        self.stopped: list[str] = []
        self.plans: deque[StepPlan] = deque()
        results = ResultInbox()
        self.next_result, self.when_failed, self.fail = results.get, results.when_failed, results.fail
        self._report = results.put

    async def prepare(self) -> None:
        raise AssertionError("the engine process starts executors")

    async def start(self) -> EngineReady:
        raise AssertionError("the engine process starts executors")

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    async def call(self, name: str, payload: bytes) -> list[bytes]:
        raise AssertionError("no worker is called")

    async def close(self, *, hung: bool) -> None:
        raise AssertionError("the engine process closes executors")

    def answer(self) -> None:
        plan = self.plans.popleft()
        self._report(StepResult(plan.step_id, [[7] for wanted in plan.num_wanted if wanted]))


class Loop:
    def __init__(self, depth: int, step_timeout_seconds: float = 60.0) -> None:
        self.clock = Clock()
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4)
        self.scheduler = Scheduler(
            limits, kv_groups=[FULL], num_pages=64, max_model_len=64, eos_token_ids=(), clock=self.clock
        )
        self.executor = ManualExecutor(depth)
        self.deltas: list[RequestDelta] = []
        self.engine = Engine(
            self.scheduler,
            self.executor,
            watch=StepWatch(
                StepTimes(step_timeout_seconds, fixed=True), lambda: self.executor.pids, lambda: self.executor.stopped
            ),
            on_deltas=self.deltas.extend,
            timeline=Timeline(Path()),
        )

    def add(self, request_id: str, max_tokens: int = 20) -> None:
        assert self.scheduler.add(make_request(request_id, 6, max_tokens=max_tokens)) == []
        self.engine.fill()


def run(test: Callable[[], object]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()  # type: ignore[misc]

    asyncio.run(limited())


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_as_many_steps_are_in_flight_as_the_executor_is_deep(depth: int) -> None:
    async def test() -> None:
        loop = Loop(depth)
        running = asyncio.create_task(loop.engine.run())
        loop.add("a")
        await settle()
        assert len(loop.executor.plans) == depth
        loop.add("b")  # while a result is waited for
        assert len(loop.executor.plans) == depth
        loop.executor.answer()
        await settle()
        assert len(loop.executor.plans) == depth
        assert len(loop.executor.plans[-1].slots) == 2
        assert [delta.token_ids for delta in loop.deltas] == [[7]]
        running.cancel()

    run(test)


def test_a_step_without_a_result_ends_the_engine() -> None:
    async def test() -> None:
        loop = Loop(depth=2, step_timeout_seconds=0.05)
        loop.add("a")
        with pytest.raises(EngineError, match="QUIRE_ENGINE_ITERATION_TIMEOUT_S raises the limit"):
            await loop.engine.run()

    run(test)


@pytest.mark.parametrize("idle_seconds", [0.0, 0.01, 0.2], ids=["with-the-last-result", "at-once", "after-a-while"])
def test_an_idle_engine_ends_when_its_workers_have_failed(idle_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.engine.engine.QUIET_SECONDS", 0.1)

    async def test() -> None:
        loop = Loop(depth=1)
        running = asyncio.create_task(loop.engine.run())
        loop.add("a", max_tokens=1)
        await settle()
        loop.executor.answer()
        if idle_seconds:
            await asyncio.sleep(idle_seconds)
            assert not loop.scheduler.num_in_flight
        loop.executor.fail(EngineError("Worker 1 was killed."))
        with pytest.raises(EngineError, match="Worker 1 was killed"):
            await running
        assert [delta.token_ids for delta in loop.deltas] == [[7]]

    run(test)


def test_the_oldest_step_in_flight_tells_whether_workers_hang() -> None:
    async def test() -> None:
        loop = Loop(depth=2)
        running = asyncio.create_task(loop.engine.run())
        assert not loop.engine.is_hung
        loop.add("a")
        loop.clock.now += 60.0
        assert loop.engine.is_hung
        loop.executor.answer()
        loop.executor.answer()
        await settle()
        assert not loop.engine.is_hung  # what is in flight now was planned just now
        running.cancel()

    run(test)

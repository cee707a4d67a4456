"""Engines that one process keeps and others use."""

import asyncio

import pytest

from quire.core.engine.borrowed_engine import BorrowingLauncher, EngineReport, FollowsOwner
from quire.core.engine.client import EngineClient
from quire.core.engine.engine_handle import EngineHandle
from quire.core.engine.engine_life import EngineMessage
from quire.core.engine.failures import fault_of
from quire.core.engine.restart_policy import Fault, RestartPolicy
from quire.core.engine.running_engine import EngineAddress
from quire.core.errors import QuireError
from quire.core.wire.protocol import EngineReady, FinishReason, Heartbeat, SchedulerStats, StepOutputs
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, Stream, engine_config


class Told:
    """Owns engines, and remembers their starts and ends."""

    def __init__(self) -> None:
        self.engines: list[EngineAddress] = []
        self.ends: list[object] = []
        self.faults: list[Fault] = []
        self.stats = SchedulerStats()

    def has_work(self, engine: EngineHandle) -> bool:
        return self.stats.num_running > 0

    def on_ready(self, engine: EngineHandle, ready: EngineReady) -> None:
        self.engines.append(engine.address)

    def on_message(self, engine: EngineHandle, message: EngineMessage) -> None:
        assert isinstance(message, StepOutputs | Heartbeat)
        self.stats = message.stats

    def on_crash(self, engine: EngineHandle, end: QuireError) -> None:
        self.ends.append(engine.number)
        self.faults.append(fault_of(end))

    def on_dead(self, engine: EngineHandle, error: QuireError) -> None:
        self.ends.append(error)


def test_a_visitor_starts_with_the_engines_that_run_and_leaves_them_running() -> None:
    async def scenario() -> None:
        told = Told()
        launcher = EngineLauncher(engine_config(), worker_factory=NULL_WORKER)
        owner = EngineHandle(0, launcher, told, RestartPolicy())
        ready = await owner.start()
        try:
            for _ in range(2):
                visits = [BorrowingLauncher(), BorrowingLauncher()]  # of the second engine, nothing is heard
                client = EngineClient(visits, num_slots=8, restarts=FollowsOwner, known=[ready, ready])
                visits[0].on_report(EngineReport(0, told.engines[0]))
                async with asyncio.timeout(60):
                    assert (await client.start()).num_pages == 2 * ready.num_pages
                assert [each.state for each in client.status().engines] == ["serving", "starting"]
                assert await Stream(client, "next", [1, 2], 3).finish_reason() is FinishReason.LENGTH
                Stream(client, "left behind", [1], 200)
                await client.close()
            async with asyncio.timeout(60):  # the engine notices that a visitor has gone
                while told.stats.num_steps < 6 or told.stats.num_running:
                    await asyncio.sleep(0.01)
            assert (len(told.engines), told.ends) == (1, [])
            visits[1].on_report(EngineReport(1, end="it was given up", is_gone=True))
            late = EngineClient(visits[1:], num_slots=8, restarts=FollowsOwner)
            failed = await asyncio.gather(late.start(), return_exceptions=True)
            assert "it was given up" in str(failed[0])
        finally:
            await owner.close()
        assert owner.is_dead

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["own", "peer", "elsewhere"])
def test_a_visitor_is_told_whose_fault_an_end_was(fault: Fault) -> None:
    """So it blames its requests for the crashes of an engine alone."""

    async def scenario() -> None:
        told, guest, visit = Told(), Told(), BorrowingLauncher()
        owner = EngineHandle(0, EngineLauncher(engine_config(), worker_factory=NULL_WORKER), told, RestartPolicy())
        await owner.start()
        visitor = EngineHandle(0, visit, guest, FollowsOwner())
        visit.on_report(EngineReport(0, told.engines[0]))
        try:
            await visitor.start()
            visit.on_report(EngineReport(0, end="the host is gone.", fault=fault))
            async with asyncio.timeout(60):
                while not guest.ends:
                    await asyncio.sleep(0.01)
            assert visitor.status().reason == "the host is gone."
            assert guest.faults == [fault]
        finally:
            await visitor.close()
            await owner.close()

    asyncio.run(scenario())

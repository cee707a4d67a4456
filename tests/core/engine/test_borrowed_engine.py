"""Engines that one process keeps and others use."""

import asyncio

from quire.core.engine.borrowed_engine import BorrowingLauncher, EngineReport, FollowsOwner
from quire.core.engine.client import EngineClient
from quire.core.engine.engine_handle import EngineHandle
from quire.core.engine.engine_life import EngineMessage
from quire.core.engine.restart_policy import RestartPolicy
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


def test_a_visitor_is_told_whether_an_engine_ended_because_of_another_one() -> None:
    """Its requests fail when an engine has crashed twice under them, and not when it was ended so often."""

    async def scenario() -> None:
        told, visit = Told(), BorrowingLauncher()
        launcher = EngineLauncher(engine_config(max_model_len=100_000), worker_factory=NULL_WORKER)
        owner = EngineHandle(0, launcher, told, RestartPolicy())
        await owner.start()
        client = EngineClient([visit], num_slots=8, restarts=FollowsOwner)
        visit.on_report(EngineReport(0, told.engines[0]))
        try:
            await client.start()
            stream = Stream(client, "long", [1], 90_000)
            for has_lost_peer in (True, True, False, False):
                assert stream.last is None
                visit.on_report(EngineReport(0, end="the host is gone.", has_lost_peer=has_lost_peer))
                async with asyncio.timeout(60):
                    while client.status().engine.state == "serving":
                        await asyncio.sleep(0.01)
                    assert client.status().engine.reason == "the host is gone."
                    visit.on_report(EngineReport(0, told.engines[0]))
                    while client.status().engine.state != "serving":
                        await asyncio.sleep(0.01)
            assert await stream.finish_reason() is FinishReason.ERROR
        finally:
            await client.close()
            await owner.close()

    asyncio.run(scenario())

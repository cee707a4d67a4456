"""Engines that one process keeps and others use."""

import asyncio

from quire.core.engine.borrowed_engine import BorrowingLauncher, EngineAddress, FollowsOwner
from quire.core.engine.client import EngineClient
from quire.core.engine.engine_owner import EngineOwner
from quire.core.errors import EngineDeadError, PeerLostError, QuireError
from quire.core.wire.protocol import EngineReady, FinishReason, SchedulerStats
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, Stream, engine_config


class Told:
    """Remembers what an owner tells."""

    def __init__(self) -> None:
        self.engines: list[EngineAddress] = []
        self.ends: list[object] = []
        self.stats = SchedulerStats()

    def on_started(self, number: int, engine: EngineAddress, ready: EngineReady) -> None:
        self.engines.append(engine)

    def on_ended(self, number: int, end: QuireError) -> None:
        self.ends.append(number)

    def on_gone(self, number: int, error: QuireError) -> None:
        self.ends.append(error)

    def on_stats(self, number: int, stats: SchedulerStats) -> None:
        self.stats = stats


def test_a_visitor_starts_with_the_engines_that_run_and_leaves_them_running() -> None:
    async def scenario() -> None:
        told = Told()
        owner = EngineOwner(0, EngineLauncher(engine_config(), worker_factory=NULL_WORKER), told)
        ready = await owner.start()
        try:
            for _ in range(2):
                visits = [BorrowingLauncher(), BorrowingLauncher()]  # of the second engine, nothing is heard
                client = EngineClient(visits, num_slots=8, restarts=FollowsOwner, known=[ready, ready])
                visits[0].on_started(told.engines[0])
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
            visits[1].on_gone("it was given up")
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
        owner = EngineOwner(0, EngineLauncher(engine_config(max_model_len=100_000), worker_factory=NULL_WORKER), told)
        await owner.start()
        client = EngineClient([visit], num_slots=8, restarts=FollowsOwner)
        visit.on_started(told.engines[0])
        try:
            await client.start()
            stream = Stream(client, "long", [1], 90_000)
            for kind in (PeerLostError, PeerLostError, EngineDeadError, EngineDeadError):
                assert stream.last is None
                visit.on_ended(kind("the host is gone."))
                async with asyncio.timeout(60):
                    while client.status().engine.state == "serving":
                        await asyncio.sleep(0.01)
                    assert client.status().engine.reason == "the host is gone."
                    visit.on_started(told.engines[0])
                    while client.status().engine.state != "serving":
                        await asyncio.sleep(0.01)
            assert await stream.finish_reason() is FinishReason.ERROR
        finally:
            await client.close()
            await owner.close()

    asyncio.run(scenario())

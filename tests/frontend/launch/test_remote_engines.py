"""Whole engines on another host, seen from both sides, over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import CoordinatorStart, EngineEnded, EngineStarted, NodeStart, Order, StartEngine
from quire.core.cluster.node import Node
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.cluster.participant import Participant
from quire.core.config.resolved import EngineConfig
from quire.core.errors import EngineDeadError, ModelLoadError, PeerLostError
from quire.core.logging import LoggingConfig
from quire.core.wire.channel import bind_router
from quire.core.wire.protocol import Heartbeat, SchedulerStats, encoder
from quire.core.wire.rank import EnginePlace, Layout
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.launch.node_engines import NodeEngines
from quire.frontend.launch.remote_engines import RemoteLauncher, RemoteNodes
from tests.core.engine.null_engine import NULL_WORKER, client_of, engine_config, kill_late
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
KEYS = JoinToken("t" * 32).keys()


def facts(*engines: int) -> NodeFacts:
    address = f"127.0.0.{1 + engines[0]}"
    return NodeFacts("engines", list(engines), 4, address, f"host-{engines[0]}", "1.0", {}, "d")


def engine(number: int) -> EngineConfig:
    return replace(engine_config(), place=EnginePlace(number), device="cuda")


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[RemoteNodes, str]]:
    """A server with engine 0, and where its nodes join."""
    address = f"127.0.0.1:{free_port()}"
    nodes = RemoteNodes(CoordinatorStart(address, KEYS, facts(0)))
    try:
        yield nodes, address
    finally:
        nodes.close()
        await asyncio.sleep(0.1)  # it closes on the loop


@contextlib.asynccontextmanager
async def server_with_node(*engines: int) -> AsyncIterator[RemoteNodes]:
    """The same, and a node that can start other engines."""
    async with server() as (nodes, address):
        node = Node(NodeStart(address, KEYS, facts(*engines), "", LoggingConfig()), NodeEngines)
        serving = asyncio.create_task(node.run())
        yield nodes
        node.close()
        await serving


class Member:
    """A node that does nothing of what it is told by itself."""

    def __init__(self, address: str, *engines: int) -> None:
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.on_order = self.orders.put_nowait
        self.participant = Participant(address, KEYS, facts(*engines), self)
        self.running = asyncio.create_task(self.participant.run())

    def on_input(self, message: bytes) -> None:
        raise AssertionError(message)

    async def told_to_start(self) -> int:
        order = await self.orders.get()
        assert isinstance(order, StartEngine)
        return order.config.place.data

    async def close(self) -> None:
        self.participant.leave("it was told to stop.")
        await self.running
        self.participant.close()


def test_an_engine_that_cannot_be_started_ends_with_the_reason_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    reason = "2 engines of 1 workers need 2 GPUs, and CUDA_VISIBLE_DEVICES names 1."

    async def test() -> None:
        async with server_with_node(2, 3) as nodes:
            with pytest.raises(EngineDeadError, match=f"engine 3 cannot be started: .*{reason}"):
                await nodes.start(engine(3))
            assert nodes.missing == [1]  # the node is still there, for its other engine

    run(test())
    assert [reason in record.message for record in caplog.records].count(True) == 1


def test_an_engine_that_finds_no_room_says_so_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setitem(
        EngineLauncher.__init__.__kwdefaults__, "worker_factory", "tests.executor.doubles:UnloadableWorker"
    )

    async def test() -> None:
        async with server_with_node(2, 3) as nodes:
            config = replace(engine_config("mp"), place=EnginePlace(3), layout=Layout(tensor=2))
            async with client_of(RemoteLauncher(config, nodes)) as client:
                with pytest.raises(ModelLoadError, match="download it again"):
                    await client.start()

    run(test())
    assert capfd.readouterr().err.count("download it again") == 1  # of the engine itself, and not of each worker


def test_engines_of_a_lost_server_have_ended_when_their_node_waits_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", NULL_WORKER)

    async def test() -> None:
        before = set(psutil.Process().children())
        async with server() as (nodes, address):
            node = Node(NodeStart(address, KEYS, facts(3), "", LoggingConfig()), NodeEngines)
            serving = asyncio.create_task(node.run())
            await nodes.start(replace(engine_config(), place=EnginePlace(3)))
        while "It waits for node 0 again." not in caplog.text:
            await asyncio.sleep(0.01)
        assert set(psutil.Process().children()) <= before
        node.close()
        await serving

    run(test())


def test_a_node_starts_an_engine_when_the_one_before_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", NULL_WORKER)
    kill_late(monkeypatch)

    async def test() -> None:
        before = set(psutil.Process().children())
        async with server_with_node(3) as nodes:
            config = replace(engine_config(), place=EnginePlace(3))
            first = await nodes.start(config)
            [process] = set(psutil.Process().children()) - before
            second = await nodes.start(config)
            assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            assert not second.ended.done()
            assert first.address != second.address
        assert set(psutil.Process().children()) <= before

    run(test())


def test_an_engine_may_end_before_its_start_was_noticed() -> None:
    async def test() -> None:
        async with server() as (nodes, address):
            member = Member(address, 2)
            starting = asyncio.create_task(nodes.start(engine(2)))
            assert await member.told_to_start() == 2
            nodes.on_engine(nodes._engines[2].node, EngineStarted(2, "tcp://127.0.0.3:1"))
            nodes.on_engine(nodes._engines[2].node, EngineEnded(2, 7))
            assert await (await starting).wait() == 7
            await member.close()

    run(test())


def test_a_peer_is_not_blamed_for_the_end_of_an_engine_that_was_killed_before() -> None:
    async def test() -> None:
        async with server() as (nodes, address):
            member = Member(address, 2)
            starting = asyncio.create_task(nodes.start(engine(2)))
            assert await member.told_to_start() == 2
            member.participant.report(EngineStarted(2, "tcp://127.0.0.3:1"))
            started = await starting
            started.kill()
            started.end(PeerLostError("another one has ended."))
            member.participant.report(EngineEnded(2, -9, was_killed=True))
            assert await started.wait() == -9
            await member.close()

    run(test())


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_peer_is_blamed_for_the_end_of_an_engine_that_the_node_has_killed_alone(was_killed: bool) -> None:
    async def test() -> None:
        async with server() as (nodes, address):
            member = Member(address, 2)
            starting = asyncio.create_task(nodes.start(engine(2)))
            assert await member.told_to_start() == 2
            member.participant.report(EngineStarted(2, "tcp://127.0.0.3:1"))
            started = await starting
            started.end(PeerLostError("another one has ended."))
            member.participant.report(EngineEnded(2, -9, was_killed=was_killed))
            with pytest.raises(PeerLostError) if was_killed else contextlib.nullcontext():
                assert await started.wait() == -9
            await member.close()

    run(test())


def test_a_node_says_whether_it_has_killed_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EngineLauncher.__init__.__kwdefaults__, "worker_factory", NULL_WORKER)

    async def test() -> None:
        before = set(psutil.Process().children())
        async with server_with_node(3) as nodes:
            config = replace(engine_config(), place=EnginePlace(3))
            first = await nodes.start(config)
            [process] = set(psutil.Process().children()) - before
            process.kill()
            assert await first.wait() == -9
            second = await nodes.start(config)
            second.end(PeerLostError("another one has ended."))
            with pytest.raises(PeerLostError, match="another one"):
                await second.wait()
            assert [each.ended.result().was_killed for each in (first, second)] == [False, True]

    run(test())


def test_a_host_that_is_lost_with_its_engine_s_connection_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Also at the first start. The connection's end is seen before the host's silence."""

    async def test() -> None:
        async with server() as (nodes, address):
            member = Member(address, 2)
            async with client_of(RemoteLauncher(engine(2), nodes)) as client:
                starting = asyncio.create_task(client.start())
                assert await member.told_to_start() == 2
                greeted = asyncio.Event()

                def on_message(frames: list[bytes]) -> None:
                    router.send([frames[0], encoder().encode(Heartbeat(SchedulerStats()))])
                    greeted.set()

                router = bind_router("tcp://127.0.0.3:*", KEYS, on_message)
                member.participant.report(EngineStarted(2, router.address))
                await greeted.wait()
                while client.status_of(0).silent_seconds is None:
                    await asyncio.sleep(0.01)
                router.close()
                member.running.cancel()
                member.participant.close()
                member = Member(address, 2)
                assert await member.told_to_start() == 2
                assert not starting.done()
                await member.close()
            await asyncio.gather(starting, return_exceptions=True)

    run(test())
    assert "host-2" in caplog.text
    assert "connection to the engine" not in caplog.text


def test_a_node_does_not_speak_for_the_engines_of_another() -> None:
    async def test() -> None:
        async with server() as (nodes, address):
            true, false = Member(address, 2), Member(address, 3)
            starts = [asyncio.create_task(nodes.start(engine(number))) for number in (2, 3)]
            assert (await true.told_to_start(), await false.told_to_start()) == (2, 3)
            false.participant.report(EngineStarted(2, "tcp://127.0.0.4:1"))
            false.participant.report(EngineStarted(3, "tcp://127.0.0.4:2"))
            await starts[1]
            assert not starts[0].done()
            true.participant.report(EngineStarted(2, "tcp://127.0.0.3:1"))
            started = await starts[0]
            assert started.address == "tcp://127.0.0.3:1"
            false.participant.report(EngineEnded(2, 1))
            false.participant.report(EngineEnded(3, 1))
            assert await starts[1].result().wait() == 1
            assert not started.ended.done()
            for member in (true, false):
                await member.close()

    run(test())

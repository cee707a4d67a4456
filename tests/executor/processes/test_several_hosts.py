"""Workers on several hosts: addresses of the loopback stand for hosts, each with an agent of its own."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import CoordinatorStart, NodeStart, OpenRendezvous, Order, RendezvousOpened
from quire.core.cluster.node import Node
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.cluster.participant import Participant
from quire.core.errors import EngineError, HostLostError, ModelLoadError
from quire.core.logging import LoggingConfig
from quire.core.wire.rank import EnginePlace, Layout
from quire.executor.processes.multiproc import MultiProcExecutor
from quire.executor.processes.node_workers import NodeWorkers
from quire.executor.processes.placement import SeveralHosts
from tests.executor.doubles import make_config, results_of, submit, token_of
from tests.servers import free_port

ROOT = Path(__file__).parents[3]
KEYS = JoinToken("t" * 32).keys()


@pytest.fixture(autouse=True)
def _doubles_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(limited())


def facts(rank: int, num_ranks: int = 2) -> NodeFacts:
    return NodeFacts("workers", [rank], num_ranks, f"127.0.0.{rank + 1}", f"host-{rank}", "1.0", {}, "d")


async def start_agent(address: str, stderr: int | None) -> asyncio.subprocess.Process:
    start = NodeStart(address, KEYS, facts(1), "/elsewhere", LoggingConfig())
    fd = os.memfd_create("test-node")
    with open(fd, "wb") as file:
        file.write(msgspec.msgpack.encode(start))
        file.flush()
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire.executor.processes.node_process", str(fd), pass_fds=[fd], stderr=stderr
        )


@contextlib.asynccontextmanager
async def agent(address: str, stderr: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start_agent(address, stderr)
    try:
        yield process
    finally:
        await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.terminate()
    await process.wait()


def second_engine(address: str, factory: str = "NullWorker") -> MultiProcExecutor:
    """Of two engines, the one whose workers are all on other nodes, 2 and 3."""
    config = replace(make_config(2), layout=Layout(data=2, tensor=2, nodes=2), place=EnginePlace(1))
    placement = SeveralHosts(config, CoordinatorStart(address, KEYS, facts(0, 4), elsewhere=[1]))
    return MultiProcExecutor(config, factory=f"quire.executor.processes.null_worker:{factory}", placement=placement)


def is_free(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


class Orders:
    """The orders that a member hears."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Order] = asyncio.Queue()
        self.on_order = self.queue.put_nowait

    def on_input(self, message: bytes) -> None:
        raise AssertionError(message)


@contextlib.asynccontextmanager
async def executor(address: str, factory: str = "NullWorker") -> AsyncIterator[MultiProcExecutor]:
    config = replace(make_config(4), layout=Layout(tensor=4, nodes=2))
    module = "quire.executor.processes.null_worker" if factory == "NullWorker" else "tests.executor.doubles"
    placement = SeveralHosts(config, CoordinatorStart(address, KEYS, facts(0)))
    made = MultiProcExecutor(config, factory=f"{module}:{factory}", placement=placement)
    try:
        yield made
    finally:
        await made.close(hung=False)


def test_an_engine_waits_for_its_nodes_and_they_serve_one_engine_after_another() -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        before = set(psutil.Process().children())
        async with executor(address, "NotingWorker") as first:
            starting = asyncio.create_task(first.start())
            while first.waits_for is None:
                await asyncio.sleep(0.01)
            assert first.waits_for == "node 1 of 2"
            async with agent(address) as node:
                await starting
                assert first.waits_for is None
                workers = psutil.Process(node.pid).children()
                assert len(workers) == 2
                assert len(set(psutil.Process().children()) - before) == 2 + 1  # the agent is a child, too
                submit(first, range(2))
                answers = await first.call("note", b"so")
                assert [each.split()[0] for each in answers] == [b"tp0", b"tp1", b"tp2", b"tp3"]
                assert [result.token_ids for result in await results_of(first, 2)] == [token_of(0), token_of(1)]
                await first.close(hung=False)
                await asyncio.to_thread(psutil.wait_procs, workers, 30)
                assert not psutil.Process(node.pid).children()
                while not is_free(address):  # ZeroMQ closes sockets in a thread of its own
                    await asyncio.sleep(0.01)
                async with executor(address) as second:  # the agent has joined again by itself
                    await second.start()
                    submit(second, range(100))
                    results = await results_of(second, 100)
                    assert [result.token_ids for result in results] == [token_of(step) for step in range(100)]

    run(test())


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_an_agent_that_dies_or_hangs_fails_the_engine_and_leaves_no_worker(with_signal: int) -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with executor(address, "StuckWorker") as stuck, agent(address) as node:
            await stuck.start()
            workers = psutil.Process(node.pid).children()
            submit(stuck, [0])
            started = time.monotonic()
            node.send_signal(with_signal)
            with pytest.raises(HostLostError, match=r"Node 1 \(host-1, 127\.0\.0\.2\) is lost"):
                await stuck.next_result()
            assert time.monotonic() - started < 20  # three seconds, where the machine has time
            await stuck.close(hung=False)
            if with_signal == signal.SIGSTOP:
                node.send_signal(signal.SIGCONT)  # the cable is back
            _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 30)
            assert not alive

    run(test())


def test_a_worker_that_dies_on_another_host_is_named() -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with executor(address, "StuckWorker") as stuck, agent(address) as node:
            await stuck.start()
            submit(stuck, [0])
            psutil.Process(node.pid).children()[0].kill()
            with pytest.raises(EngineError, match=r"Node 1 .* is lost: Worker tp[23] .* was killed by SIGKILL") as end:
                await stuck.next_result()
            assert not isinstance(end.value, HostLostError)  # it may be the fault of what the worker did

    run(test())


def test_a_node_that_is_lost_while_another_opens_the_meeting_fails_the_start() -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        engine, orders = second_engine(address), Orders()
        starting = asyncio.create_task(engine.start())
        members = [
            Participant(address, KEYS, facts(rank, 4), listener) for rank, listener in ((2, orders), (3, Orders()))
        ]
        running = [asyncio.create_task(member.run()) for member in members]
        try:
            assert await orders.queue.get() == OpenRendezvous()
            members[1].leave("it was told to stop.")
            while engine.waits_for != "node 3 of 4":
                await asyncio.sleep(0.01)
            members[0].report(RendezvousOpened("tcp://127.0.0.3:1"))
            with pytest.raises(EngineError, match=r"Node 3 \(host-3, 127\.0\.0\.4\) is lost: it was told to stop"):
                await starting
        finally:
            await engine.close(hung=False)
            await asyncio.wait(running)
            for member in members:
                member.close()

    run(test())


def test_a_node_that_cannot_open_the_meeting_says_so_on_both_sides(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interface had its address when it joined."""
    interfaces = psutil.net_if_addrs()
    gone = [interfaces["lo"][0]._replace(address="192.0.2.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {**interfaces, "gone": gone})

    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        engine, here = second_engine(address), facts(2, 4)
        starting = asyncio.create_task(engine.start())
        elsewhere = replace(here, address="192.0.2.1")
        starts = [NodeStart(address, KEYS, each, "", LoggingConfig()) for each in (elsewhere, facts(3, 4))]
        agents = [Node(start, NodeWorkers) for start in starts]
        running = [asyncio.create_task(agent.run()) for agent in agents]
        try:
            with pytest.raises(EngineError, match=r"Node 2 .* is lost: .*Cannot assign requested address"):
                await starting
        finally:
            for each in agents:
                each.close()
            await engine.close(hung=False)
            await asyncio.wait(running)

    run(test())
    assert "this node has ended its work: " in caplog.text
    assert "Cannot assign requested address" in caplog.text.partition("this node has ended its work: ")[2]


def test_a_host_without_room_ends_the_start_with_a_sentence_on_both_sides() -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with executor(address, "NoRoomWorker") as full, agent(address, asyncio.subprocess.PIPE) as node:
            with pytest.raises(ModelLoadError, match=r"Worker tp[23] on node 1: .*12 GiB are free; use another host"):
                await full.start()
        assert node.stderr is not None
        assert b"12 GiB are free; use another host" in await node.stderr.read()

    run(test())

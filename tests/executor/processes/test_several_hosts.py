"""Workers on several hosts: addresses of the loopback stand for hosts, each with an agent of its own."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from quire.core.cluster.facts import NodeFacts
from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import HeadStart, NodeStart
from quire.core.errors import EngineError, ModelLoadError
from quire.core.logging import LoggingConfig
from quire.core.wire.rank import Layout
from quire.executor.processes.multiproc import MultiProcExecutor
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


def facts(rank: int) -> NodeFacts:
    return NodeFacts("workers", [rank], 2, f"127.0.0.{rank + 1}", f"host-{rank}", "1.0", "2.13", "d")


async def start_agent(address: str) -> asyncio.subprocess.Process:
    start = NodeStart(address, KEYS, facts(1), "/elsewhere", LoggingConfig())
    fd = os.memfd_create("test-node")
    with open(fd, "wb") as file:
        file.write(msgspec.msgpack.encode(start))
        file.flush()
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire.executor.processes.node_process", str(fd), pass_fds=[fd]
        )


@contextlib.asynccontextmanager
async def agent(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start_agent(address)
    try:
        yield process
    finally:
        await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.terminate()
    await process.wait()


@contextlib.asynccontextmanager
async def executor(address: str, factory: str = "NullWorker") -> AsyncIterator[MultiProcExecutor]:
    config = replace(make_config(4), layout=Layout(tensor=4, nodes=2))
    module = "quire.executor.processes.null_worker" if factory == "NullWorker" else "tests.executor.doubles"
    placement = SeveralHosts(config, HeadStart(address, KEYS, facts(0)))
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
            with pytest.raises(EngineError, match=r"Node 1 \(host-1, 127\.0\.0\.2\) is lost|Worker tp[23] "):
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
            with pytest.raises(EngineError, match=r"Node 1 .* is lost: Worker tp[23] .* was killed by SIGKILL"):
                await stuck.next_result()

    run(test())


def test_a_host_without_room_ends_the_start_with_its_sentence() -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with executor(address, "NoRoomWorker") as full, agent(address):
            with pytest.raises(ModelLoadError, match="12 GiB are free; use another host"):
                await full.start()

    run(test())

"""A spare engine waits beside the one that serves, and takes its place. Real processes."""

import asyncio
import os
import signal
import subprocess
from typing import Literal

import psutil
import pytest
from msgspec.structs import replace

from quire.core.engine import engine_handle
from quire.core.wire.protocol import FinishReason
from quire.core.wire.rank import Layout
from quire.frontend.launch.launcher import EngineLauncher, EngineSubprocess
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config
from tests.core.engine.supervised import ENDLESS, MAX_LENGTH, answers, until


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.parametrize(("executor", "transport", "workers"), [("uni", "ipc", 0), ("mp", "ipc", 2), ("uni", "tcp", 0)])
def test_the_spare_engine_with_its_workers_follows_one_that_ends(
    executor: Literal["uni", "mp"], transport: Literal["ipc", "tcp"], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "SPARE_SECONDS", 0.0)
    before = children()
    config = replace(engine_config(executor, max_model_len=MAX_LENGTH), keeps_spare=True)
    config = replace(config, layout=Layout(tensor=workers or 1))

    async def scenario() -> set[psutil.Process]:
        async with client_of(EngineLauncher(config, transport, worker_factory=NULL_WORKER)) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], ENDLESS)
            await until(lambda: bool(stream.token_ids) and len(children() - before) == 2)
            [spare] = [each for each in children() - before if each.pid != client.engine_pids[0]]
            await until(lambda: len(spare.children()) == workers)
            its_workers = spare.children()
            os.kill(client.engine_pids[0] or 0, signal.SIGKILL)
            await until(lambda: client.engine_pids[0] == spare.pid and client.status().engine.state == "serving")
            assert spare.children() == its_workers
            stream.token_ids.clear()
            await until(lambda: bool(stream.token_ids))
            await until(lambda: len(children() - before) == 2)  # there is another one
            return children() - before

    left = asyncio.run(scenario())
    _, alive = psutil.wait_procs(left, 30)
    assert not alive


def test_a_spare_engine_that_was_killed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_handle, "SPARE_SECONDS", 0.0)
    before = children()

    async def scenario() -> None:
        config = replace(engine_config(max_model_len=MAX_LENGTH), keeps_spare=True)
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            await until(lambda: len(children() - before) == 2)
            for process in children() - before:
                process.kill()
            await until(lambda: client.status().engine.restarts > 0 and client.status().engine.state == "serving")
            assert await answers(client)
            assert await Stream(client, "next", [1, 2], 3).finish_reason() is FinishReason.LENGTH

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_engine_that_was_killed_or_stopped_is_replaced(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its turn comes, while the engine that serves goes on."""
    monkeypatch.setattr(engine_handle, "SPARE_SECONDS", 0.0)
    monkeypatch.setattr(engine_handle, "SPARE_CHECK_SECONDS", 0.2)
    before = children()
    config = replace(engine_config(max_model_len=MAX_LENGTH), keeps_spare=True)

    async def scenario() -> None:
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            serving = client.engine_pids[0]
            await until(lambda: len(children() - before) == 2)
            [spare] = [each for each in children() - before if each.pid != serving]
            spare.send_signal(number)
            await until(lambda: spare not in children() and len(children() - before) == 2)
            assert (client.engine_pids[0], client.status().engine.restarts) == (serving, 0)
            os.kill(serving or 0, signal.SIGKILL)
            await until(lambda: client.status().engine.restarts > 0 and client.status().engine.state == "serving")
            assert await answers(client)

    asyncio.run(scenario())


@pytest.mark.parametrize("has_spare", [True, False])
def test_the_next_engine_loads_nothing_before_all_processes_of_the_one_before_have_ended(
    has_spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of this test stands for those that take long to end."""
    monkeypatch.setattr(engine_handle, "SPARE_SECONDS", 0.0)
    config = replace(engine_config(max_model_len=MAX_LENGTH), keeps_spare=has_spare)

    async def scenario(slow: subprocess.Popen[bytes]) -> None:
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            first = client.engine_pids[0]
            monkeypatch.setattr(EngineSubprocess, "group", slow.pid)
            os.kill(first or 0, signal.SIGKILL)
            await until(lambda: client.engine_pids[0] not in (first, None))
            next_one = psutil.Process(client.engine_pids[0] or 0)
            [handle] = client._fleet.engines
            await until(lambda: handle._life is not None and handle._life.is_heard)  # it beats before it loads
            assert client.status().engine.state == "restarting"
            slow.kill()
            await until(lambda: client.status().engine.state == "serving")
            assert client.engine_pids[0] == next_one.pid

    with subprocess.Popen(["sleep", "100"], start_new_session=True) as slow:
        asyncio.run(scenario(slow))

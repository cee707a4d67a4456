"""Engine client and engine process over real sockets, with a worker that answers at once instead of a model."""

import asyncio
import os
import signal
import stat
from typing import Literal

import psutil
import pytest
from msgspec.structs import replace

from quire.core.errors import EngineDeadError, ModelLoadError
from quire.core.wire.protocol import FinishReason, SchedulerStats
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config


@pytest.mark.parametrize(("executor", "transport"), [("uni", "ipc"), ("mp", "ipc"), ("uni", "tcp")])
def test_requests_run_to_their_length(executor: Literal["uni", "mp"], transport: Literal["ipc", "tcp"]) -> None:
    async def scenario() -> None:
        async with client_of(EngineLauncher(engine_config(executor), transport, worker_factory=NULL_WORKER)) as client:
            ready = await client.start()
            assert ready.max_model_len == 256
            streams = [Stream(client, str(i), [1] * (i + 1), 20 + i) for i in range(12)]
            assert [await stream.finish_reason() for stream in streams] == [FinishReason.LENGTH] * 12
            assert [len(stream.token_ids) for stream in streams] == [20 + i for i in range(12)]
            assert client.num_unfinished == 0

    asyncio.run(scenario())


def test_unfinished_requests_go_on_after_the_engine_is_killed() -> None:
    async def scenario() -> None:
        # Long enough that the kill always comes in the middle, however fast the null worker is.
        config = engine_config(max_model_len=10_000)
        config = replace(config, limits=replace(config.limits, max_num_seqs=1))
        reports: list[SchedulerStats] = []
        launcher = EngineLauncher(config, worker_factory=NULL_WORKER)
        async with client_of(launcher, on_stats=reports.append) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2, 3], 8000)
            waiting = Stream(client, "b", [1] * 500, 1)
            victim = client.engine_pids[0]
            assert victim is not None

            def kill_once() -> None:
                if len(stream.token_ids) > 5:
                    stream.on_tokens = lambda: None  # tokens that were on their way still come
                    os.kill(victim, signal.SIGKILL)

            stream.on_tokens = kill_once
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == 8000
            assert client.engine_pids[0] != victim
            client.check_health()
            assert await waiting.finish_reason() is FinishReason.LENGTH
        pending = [(each.started_at, each.num_pending_tokens) for each in reports if each.num_waiting]
        assert len({engine for engine, _ in pending}) == 2
        assert all(num_tokens >= 500 for _, num_tokens in pending), "both engines know how long the prompt is"

    asyncio.run(scenario())


def test_refused_and_aborted_requests_leave_others_alone() -> None:
    async def scenario() -> None:
        async with client_of(EngineLauncher(engine_config(), worker_factory=NULL_WORKER)) as client:
            await client.start()
            too_long = Stream(client, "long", [1] * 300, 5)
            good = Stream(client, "good", [1] * 3, 100)
            gone = Stream(client, "gone", [1] * 3, 200)
            client.abort(["gone", "unknown"])
            assert await too_long.finish_reason() is FinishReason.ERROR
            assert too_long.last is not None
            assert too_long.last.failure is not None
            assert "256" in too_long.last.failure.message
            assert await good.finish_reason() is FinishReason.LENGTH
            assert not gone.done.is_set()
            assert client.num_unfinished == 0

    asyncio.run(scenario())


def test_socket_folder_is_private_and_removed() -> None:
    async def scenario() -> None:
        launcher = EngineLauncher(engine_config(), worker_factory=NULL_WORKER)
        async with client_of(launcher) as client:
            await client.start()
            folder = launcher.folder
            assert folder is not None
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert not os.path.exists(folder)

    asyncio.run(scenario())


def test_prefix_cache_is_reset_under_running_requests() -> None:
    async def scenario() -> None:
        config = engine_config(max_model_len=10_000)
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            assert await client.reset_prefix_cache()
            stream = Stream(client, "a", list(range(100)), 8000)
            while not stream.token_ids:
                await asyncio.sleep(0)
            assert not await client.reset_prefix_cache()
            assert await client.reset_prefix_cache(preempt_running=True)
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == 8000
            assert stream.last is not None
            assert stream.last.num_preemptions == 1
        with pytest.raises(EngineDeadError):
            await client.reset_prefix_cache()

    asyncio.run(scenario())


def test_no_timeline_of_an_engine_that_is_gone() -> None:
    async def scenario() -> None:
        async with client_of(EngineLauncher(engine_config(), worker_factory=NULL_WORKER)) as client:
            await client.start()
        with pytest.raises(EngineDeadError, match="Restart the server"):
            await client.profile(True)

    asyncio.run(scenario())


def test_engine_that_cannot_start_says_why() -> None:
    async def scenario() -> None:
        config = engine_config()
        async with client_of(EngineLauncher(config)) as client:  # the real worker, and no such checkpoint
            with pytest.raises(ModelLoadError, match="weights"):
                await client.start()
            with pytest.raises(EngineDeadError):
                client.check_health()

    asyncio.run(scenario())


def test_engine_launched_ahead_is_the_one_that_serves() -> None:
    async def scenario() -> None:
        launcher = EngineLauncher(engine_config(), worker_factory=NULL_WORKER)
        launcher.launch_ahead()
        async with client_of(launcher) as client:
            await client.start()
            assert launcher.folder is not None
            assert sorted(os.listdir(launcher.folder)) == ["engine-1.sock", "owner"]
            assert await Stream(client, "a", [1, 2], max_tokens=3).finish_reason() == FinishReason.LENGTH

    asyncio.run(scenario())


def test_failure_of_an_engine_launched_ahead_waits_for_its_frontend() -> None:
    async def scenario() -> None:
        launcher = EngineLauncher(engine_config(), worker_factory="quire.executor.processes.null_worker:NoSuchWorker")
        launcher.launch_ahead()
        await asyncio.sleep(1)  # by now it has failed, on any but the slowest machine
        async with client_of(launcher) as client:
            with pytest.raises(EngineDeadError, match="NoSuchWorker"):
                await client.start()

    asyncio.run(scenario())


def test_engine_launched_ahead_and_never_used_ends_with_its_launcher() -> None:
    before = set(psutil.Process().children())
    launcher = EngineLauncher(engine_config(), worker_factory=NULL_WORKER)
    launcher.launch_ahead()
    folder, started = launcher.folder, set(psutil.Process().children()) - before
    launcher.close()
    assert folder is not None
    assert not os.path.exists(folder)
    assert len(started) == 1
    _, alive = psutil.wait_procs(started, 30)
    assert not alive


def test_engine_that_still_loads_has_ended_when_its_client_is_closed() -> None:
    async def scenario() -> None:
        before = set(psutil.Process().children())
        async with client_of(EngineLauncher(engine_config(), worker_factory=NULL_WORKER)) as client:
            starting = asyncio.create_task(client.start())
            while not (started := set(psutil.Process().children()) - before):
                await asyncio.sleep(0.01)
        assert not any(process.is_running() for process in started)
        with pytest.raises(EngineDeadError, match="shut down"):
            await starting

    asyncio.run(scenario())

"""Engines cannot be launched, or end while they start: another one follows, or the reason is told. Real processes."""

import asyncio
import errno
import logging
import os
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from quire.core.engine import engine_handle
from quire.core.engine.launcher import NoMoreEnginesError
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import ConfigError, EngineDeadError, HostLostError, PeerLostError
from quire.core.processes import names_of_living
from quire.core.wire.protocol import FinishReason
from quire.frontend.launch.launcher import EngineLauncher, EngineSubprocess
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config, kill_late
from tests.core.engine.supervised import ENDLESS, LONG, MAX_LENGTH, answers, kill, launcher, open_pair, until

ROOT = Path(__file__).parents[3]


class LimitedLauncher(EngineLauncher):
    """Launches a limited number of engines."""

    def __init__(self, num_engines: int) -> None:
        super().__init__(engine_config(max_model_len=MAX_LENGTH), worker_factory=NULL_WORKER)
        self._num_left = num_engines

    async def launch(self) -> EngineSubprocess:
        if not self._num_left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._num_left -= 1
        return await super().launch()


class NotingLauncher(EngineLauncher):
    """Launches engines that have a process which outlives them, and notes what lives of the one before."""

    def __init__(self) -> None:
        config = replace(engine_config(), keeps_spare=True)
        super().__init__(config, worker_factory="tests.frontend.launch.parent_worker:make")
        self.living: list[list[str]] = []
        self._groups: list[int] = []

    async def launch(self) -> EngineSubprocess:
        engine = await super().launch()
        self.living += [names_of_living(group) for group in self._groups[-1:]]
        self._groups.append(engine.pid or 0)
        return engine

    @property
    def has_spare(self) -> bool:
        return self._spare is not None


class RepeatedLauncher(EngineLauncher):
    """Launches an engine that ends at once because of another one, and then one more; notes when it is retired."""

    is_retired = False
    num_launched = 0

    def __init__(self) -> None:
        super().__init__(engine_config(max_model_len=MAX_LENGTH), worker_factory=NULL_WORKER)

    async def launch(self) -> EngineSubprocess:
        if self.num_launched == 2:
            raise NoMoreEnginesError("there are two engines.")
        engine = await super().launch()
        self.num_launched += 1
        if self.num_launched == 1:
            engine.end(PeerLostError("another one has ended."))
        return engine

    def retire(self) -> None:
        self.is_retired = True


class WaitingLauncher(EngineLauncher):
    """Loses the engine's host at the first launch."""

    num_launched = 0

    def __init__(self) -> None:
        super().__init__(engine_config(max_model_len=MAX_LENGTH), worker_factory=NULL_WORKER)

    async def launch(self) -> EngineSubprocess:
        self.num_launched += 1
        if self.num_launched == 1:
            raise HostLostError("Node 1 is lost.")
        return await super().launch()


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Within this context, the process can open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_first_launch_that_fails_is_told_to_who_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setenv("QUIRE_RPC_BASE_PATH", "/nowhere")
        async with client_of(launcher()) as client:
            with pytest.raises(ConfigError, match="QUIRE_RPC_BASE_PATH"):
                await client.start()
        async with client_of(LimitedLauncher(0)) as client:
            with pytest.raises(EngineDeadError, match="ulimit -n"):
                await client.start()

    asyncio.run(scenario())


def test_a_path_that_is_too_long_for_a_socket_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("QUIRE_RPC_BASE_PATH", str(folder))

    async def scenario() -> None:
        async with client_of(launcher()) as client:
            with pytest.raises(EngineDeadError, match=r"File name too long.* shorter path in QUIRE_RPC_BASE_PATH"):
                await client.start()

    asyncio.run(scenario())


def test_a_first_start_that_another_engine_spoils_is_repeated_and_the_last_end_is_told() -> None:
    async def scenario() -> None:
        engine = RepeatedLauncher()
        async with client_of(engine) as client:
            await client.start()
            assert engine.num_launched == 2
            assert await answers(client)
            assert not engine.is_retired
            stream = Stream(client, "lost", [1, 2], ENDLESS)
            pid = client.engine_pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await stream.done.wait()
            assert engine.is_retired

    asyncio.run(scenario())


def test_a_first_start_whose_host_is_lost_waits_for_it_again() -> None:
    async def scenario() -> None:
        engine = WaitingLauncher()
        async with client_of(engine, restarts=lambda: RestartPolicy(max_failed_starts=0)) as client:
            starting = asyncio.create_task(client.start())
            await until(lambda: client.status().engine.reason is not None)
            assert (client.status().engine.state, client.status().engine.reason) == ("starting", "Node 1 is lost.")
            await starting
            assert engine.num_launched == 2
            assert await answers(client)

    asyncio.run(scenario())


def test_a_spare_engine_begins_beside_the_end_of_the_one_before_and_loads_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(engine_handle, "SPARE_SECONDS", 0.0)
    kill_late(monkeypatch)

    async def scenario() -> None:
        own = NotingLauncher()
        async with client_of(own) as client:
            await client.start()
            group = client.engine_pids[0] or 0
            assert any("(sleep)" in each for each in names_of_living(group))
            await until(lambda: own.has_spare)
            await kill(client)
            [living] = own.living
            assert any("(sleep)" in each for each in living), "its end was waited for"
            assert names_of_living(group) == []

    asyncio.run(scenario())


def test_removed_socket_folder_is_made_anew() -> None:
    async def scenario() -> None:
        own = launcher()
        async with client_of(own) as client:
            await client.start()
            before = own.folder
            assert before is not None
            shutil.rmtree(before)
            await kill(client)
            assert await answers(client)
            assert own.folder is not None
            assert own.folder != before
            assert stat.S_IMODE(os.stat(own.folder).st_mode) == 0o700

    asyncio.run(scenario())


def test_failed_starts_are_not_held_against_requests() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], LONG)
            for _ in range(3):  # the first holds the request, the others are killed while they load
                victim = client.engine_pids[0]
                assert victim is not None
                os.kill(victim, signal.SIGKILL)
                await until(lambda victim=victim: client.engine_pids[0] not in (None, victim))
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == LONG

    asyncio.run(scenario())


def test_engine_that_cannot_be_launched_any_more_is_given_up() -> None:
    async def scenario() -> None:
        async with client_of(LimitedLauncher(1), restarts=lambda: RestartPolicy(max_failed_starts=2)) as client:
            await client.start()
            pair = open_pair(client)
            assert client.engine_pids[0] is not None
            os.kill(client.engine_pids[0], signal.SIGKILL)
            assert await pair[0].finish_reason() is FinishReason.ERROR
            assert pair[0].last is not None
            assert "3 starts in a row failed" in pair[0].last.failure.message
            with pytest.raises(EngineDeadError, match="Too many open files"):
                client.check_health()
            assert client.status().engine.state == "dead"
            assert client.engine_pids[0] is None

    asyncio.run(scenario())


def test_without_descriptors_the_engine_is_restarted_when_there_are_some(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], LONG)
            await until(lambda: bool(stream.token_ids))
            assert client.engine_pids[0] is not None
            with no_free_descriptors():
                os.kill(client.engine_pids[0], signal.SIGKILL)
                await until(lambda: caplog.text.count("Too many open files") >= 3)
                assert client.status().engine.state == "restarting"
                assert "ulimit -n" in (client.status().engine.reason or "")
                client.check_health()
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == LONG

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())


def test_without_descriptors_a_start_can_be_closed() -> None:
    async def scenario() -> None:
        own = launcher()
        async with client_of(own) as client:
            starting = asyncio.create_task(client.start())
            await until(lambda: client.engine_pids[0] is not None)
            folder = own.folder
            with no_free_descriptors():
                await client.close()
            with pytest.raises(EngineDeadError, match="shut down"):
                await starting
        shutil.rmtree(folder or "")  # what `close` could not list

    asyncio.run(scenario())


def test_closing_ends_a_start_and_a_restart() -> None:
    async def scenario() -> None:
        own = launcher()
        async with client_of(own) as client:
            starting = asyncio.create_task(client.start())
            await until(lambda: client.engine_pids[0] is not None)
        with pytest.raises(EngineDeadError, match="shut down"):
            await starting
        async with client_of(LimitedLauncher(1)) as client:
            await client.start()
            os.kill(client.engine_pids[0] or 0, signal.SIGKILL)
            await until(lambda: client.status().engine.state == "restarting")
        assert client.status().engine.state == "dead"
        assert client.engine_pids[0] is None

    asyncio.run(scenario())

"""Engines are killed, cannot be launched, or fall silent; requests go on, or end with the reason. Real processes."""

import asyncio
import errno
import logging
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.core.engine.client import EngineClient
from quire.core.engine.ends import end_of
from quire.core.engine.launcher import NoMoreEnginesError
from quire.core.engine.process import _cause_of
from quire.core.engine.restarts import Restarts
from quire.core.errors import ConfigError, EngineDeadError, HostLostError, PeerLostError
from quire.core.processes import names_of_living
from quire.core.wire.protocol import EngineFailed, FinishReason, SchedulerStats
from quire.frontend.launch.launcher import EngineLauncher, EngineSubprocess
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config, kill_late

ROOT = Path(__file__).parents[3]

MAX_LENGTH = 100_000
ENDLESS = 90_000  # tokens: more than any engine here produces before it is killed
LONG = 8000  # tokens: enough that a kill comes in the middle


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
        super().__init__(engine_config(), worker_factory="tests.frontend.launch.parent_worker:make")
        self.living: list[list[str]] = []
        self._groups: list[int] = []

    async def launch(self) -> EngineSubprocess:
        self.living += [names_of_living(group) for group in self._groups[-1:]]
        engine = await super().launch()
        self._groups.append(engine.pid or 0)
        return engine


class DistantLauncher(EngineLauncher):
    """Launches engines behind connections that can be cut."""

    def __init__(self) -> None:
        super().__init__(engine_config(max_model_len=MAX_LENGTH), "tcp", worker_factory=NULL_WORKER)
        self.pids: list[int | None] = []
        self._carrying: set[asyncio.Task[None]] = set()

    async def launch(self) -> EngineSubprocess:
        engine = await super().launch()
        self.pids.append(engine.pid)
        host, port = engine.address.removeprefix("tcp://").split(":")

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while part := await reader.read(1 << 16):
                writer.write(part)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            theirs, ours = await asyncio.open_connection(host, int(port))
            both = carry(reader, ours), carry(theirs, writer)
            self._carrying = {asyncio.create_task(each) for each in both}
            await asyncio.wait(self._carrying, return_when=asyncio.FIRST_COMPLETED)
            for end in (ours, writer):
                end.transport.abort()

        line = await asyncio.start_server(take, "127.0.0.1", 0)
        engine.address = f"tcp://127.0.0.1:{line.sockets[0].getsockname()[1]}"
        return engine

    def cut(self) -> None:
        """Ends the connections of now."""
        for each in self._carrying:
            each.cancel()


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


class UnreachableLauncher(EngineLauncher):
    """Launches an engine at an address where no socket can be connected."""

    def __init__(self) -> None:
        super().__init__(engine_config(max_model_len=MAX_LENGTH), worker_factory=NULL_WORKER)

    async def launch(self) -> EngineSubprocess:
        self.engine = await super().launch()
        self.engine.address = "nowhere"
        return self.engine


def launcher() -> EngineLauncher:
    return EngineLauncher(engine_config(max_model_len=MAX_LENGTH), worker_factory=NULL_WORKER)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def kill(client: EngineClient) -> None:
    """Kills the engine; returns when another one serves."""
    victim = client.engine_pids[0]
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    await until(lambda: client.engine_pids[0] != victim and client.status().engine.state == "serving")


async def answers(client: EngineClient) -> bool:
    return await Stream(client, "next", [1, 2], max_tokens=3).finish_reason() is FinishReason.LENGTH


def open_pair(client: EngineClient) -> list[Stream]:
    """Two sequences of one request: when one fails, the other is aborted, as by a frontend with n = 2."""
    pair = [Stream(client, name, [1, 2], ENDLESS) for name in ("a", "b")]
    for stream, sibling in zip(pair, ("b", "a"), strict=True):
        stream.on_tokens = lambda stream=stream, sibling=sibling: client.abort([sibling] if stream.is_failed else [])
    return pair


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Within this context, the process can open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sequences_of_one_request_fail_together_at_the_second_crash() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            first, second = open_pair(client)
            for _ in range(2):
                await until(lambda: bool(first.token_ids))
                first.token_ids.clear()
                await kill(client)
            assert await first.finish_reason() is FinishReason.ERROR
            assert first.last is not None
            assert first.last.failure is not None
            assert "crashed twice" in first.last.failure.message
            assert second.last is None
            assert client.num_unfinished == 0
            assert await answers(client)

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
        async with client_of(engine, restarts=lambda: Restarts(max_failed_starts=0)) as client:
            starting = asyncio.create_task(client.start())
            await until(lambda: client.status().engine.reason is not None)
            assert (client.status().engine.state, client.status().engine.reason) == ("starting", "Node 1 is lost.")
            await starting
            assert engine.num_launched == 2
            assert await answers(client)

    asyncio.run(scenario())


def test_a_lost_host_is_told_apart_from_the_engine_s_own_failure_across_the_wire() -> None:
    for error in (HostLostError("a"), PeerLostError("a"), EngineDeadError("a")):
        assert type(end_of(EngineFailed("a", _cause_of(error)))) is type(error)


def test_sequences_of_one_request_fail_together_when_the_client_is_closed() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            first, second = open_pair(client)
            pid = client.engine_pids[0]
        assert await first.finish_reason() is FinishReason.ERROR
        assert second.last is None
        with pytest.raises(EngineDeadError, match="shut down"):
            Stream(client, "late", [1], 1)
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)

    asyncio.run(scenario())


def test_an_engine_that_is_ended_by_force_has_ended_when_that_returns() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            pid = client.engine_pids[0]
            client.kill()
            with pytest.raises(ProcessLookupError):
                os.kill(pid or 0, 0)
        unreachable = UnreachableLauncher()
        async with client_of(unreachable) as client:
            with pytest.raises(EngineDeadError, match="could not be run"):
                await client.start()
            with pytest.raises(ProcessLookupError):
                os.kill(unreachable.engine.pid or 0, 0)

    asyncio.run(scenario())


def test_an_engine_is_launched_when_all_processes_of_the_one_before_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kill_late(monkeypatch)

    async def scenario() -> None:
        own = NotingLauncher()
        async with client_of(own) as client:
            await client.start()
            assert any("(sleep)" in each for each in names_of_living(client.engine_pids[0] or 0))
            await kill(client)
            assert own.living == [[]]

    asyncio.run(scenario())


def test_an_engine_whose_connection_is_lost_is_restarted_and_streams_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        distant = DistantLauncher()
        async with client_of(distant) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], LONG)
            await until(lambda: bool(stream.token_ids))
            distant.cut()
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == LONG
            assert len(set(distant.pids)) == 2

    asyncio.run(asyncio.wait_for(scenario(), 50))  # before an engine counts as silent
    assert "the connection to the engine was lost" in caplog.text


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


def test_idle_engine_may_be_killed_as_often_as_one_likes() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            for _ in range(5):
                await kill(client)
            assert await answers(client)

    asyncio.run(scenario())


def test_engine_that_crashes_with_work_and_no_output_is_given_up() -> None:
    async def scenario() -> None:
        async with client_of(launcher(), restarts=lambda: Restarts(max_fruitless_lives=0)) as client:
            await client.start()
            assert client.engine_pids[0] is not None
            os.kill(client.engine_pids[0], signal.SIGSTOP)
            pair = open_pair(client)
            os.kill(client.engine_pids[0], signal.SIGKILL)
            assert await pair[0].finish_reason() is FinishReason.ERROR
            assert pair[0].last is not None
            assert "signal 9" in pair[0].last.failure.message
            assert client.num_unfinished == 0
            with pytest.raises(EngineDeadError, match="without output"):
                client.check_health()

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


def test_engine_that_cannot_be_launched_any_more_is_given_up() -> None:
    async def scenario() -> None:
        async with client_of(LimitedLauncher(1), restarts=lambda: Restarts(max_failed_starts=2)) as client:
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


def test_supervision_that_fails_leaves_nothing_healthy(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Restarts):
        def add(self, **_: object) -> None:
            raise ArithmeticError("a fault of its own")

    async def scenario() -> None:
        async with client_of(launcher(), restarts=Faulty) as client:
            await client.start()
            pair = open_pair(client)
            os.kill(client.engine_pids[0] or 0, signal.SIGKILL)
            assert await pair[0].finish_reason() is FinishReason.ERROR
            with pytest.raises(EngineDeadError, match="supervision failed"):
                client.check_health()
            assert client.num_unfinished == 0

    asyncio.run(scenario())
    assert "a fault of its own" in caplog.text
    assert "Traceback" in caplog.text


def test_message_that_cannot_be_handled_costs_an_engine_and_no_token() -> None:
    failed = False

    def on_stats(stats: SchedulerStats) -> None:
        nonlocal failed
        if stats.num_running and not failed:
            failed = True
            raise ArithmeticError("a fault of the counting")

    async def scenario() -> None:
        async with client_of(launcher(), on_stats=on_stats) as client:
            await client.start()
            pid = client.engine_pids[0]
            stream = Stream(client, "a", [1, 2], max_tokens=500)
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert failed
            assert client.engine_pids[0] != pid
            assert stream.token_ids == list(range(2, 502))

    asyncio.run(scenario())


def test_status_tells_how_the_engine_is_and_when_it_spoke() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            assert (client.status().engine.state, client.status().engine.silent_seconds) == ("starting", None)
            await client.start()
            assert client.status().engine.state == "serving"
            pid = client.engine_pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            # One that runs speaks at least every two seconds.
            await until(lambda: (client.status().engine.silent_seconds or 0) > 2.5)
            os.kill(pid, signal.SIGCONT)
            await until(lambda: (client.status().engine.silent_seconds or 0) < 1.0)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: client.status().engine.state == "restarting")
            assert "signal 9" in (client.status().engine.reason or "")
            await until(lambda: client.status().engine.state == "serving")
            assert client.status().engine.reason is None
        assert client.status().engine.state == "dead"
        assert "shut down" in (client.status().engine.reason or "")

    asyncio.run(scenario())


def test_silent_engine_is_killed_and_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_HEARTBEAT_TIMEOUT_S", "3")

    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], max_tokens=5000)
            pid = client.engine_pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: client.status().engine.state == "restarting")
            assert "silent for 3 s" in (client.status().engine.reason or "")
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == 5000

    asyncio.run(scenario())

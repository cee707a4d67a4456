"""Engines are killed, lost or fall silent; requests go on, or end with the reason. Real processes."""

import asyncio
import os
import signal

import pytest

from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import EngineDeadError
from quire.core.wire.protocol import FinishReason, SchedulerStats
from quire.frontend.launch.launcher import EngineLauncher, EngineSubprocess
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config
from tests.core.engine.supervised import LONG, MAX_LENGTH, answers, kill, launcher, open_pair, until


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


class UnreachableLauncher(EngineLauncher):
    """Launches an engine at an address where no socket can be connected."""

    def __init__(self) -> None:
        super().__init__(engine_config(max_model_len=MAX_LENGTH), worker_factory=NULL_WORKER)

    async def launch(self) -> EngineSubprocess:
        self.engine = await super().launch()
        self.engine.address = "nowhere"
        return self.engine


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


def test_idle_engine_may_be_killed_as_often_as_one_likes() -> None:
    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            for _ in range(5):
                await kill(client)
            assert await answers(client)

    asyncio.run(scenario())


def test_supervision_that_fails_leaves_nothing_healthy(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(RestartPolicy):
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

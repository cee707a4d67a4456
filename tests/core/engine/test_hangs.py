"""Processes hang or are stopped while they have work: that is noticed soon, and streams go on. Real processes."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from quire.core.engine import silence
from quire.core.engine.silence import SilenceWatch
from quire.core.engine.step_times import StepSize, StepTimes
from quire.core.engine.step_watch import StepWatch
from quire.core.errors import EngineKilledError
from quire.core.process_activity import Activity, ActivityMeter, is_stopped
from quire.core.wire.protocol import FinishReason
from quire.core.wire.rank import Layout
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, Stream, client_of, engine_config
from tests.core.engine.supervised import LONG, MAX_LENGTH, launcher, until

ROOT = Path(__file__).parents[3]


def test_an_engine_that_is_stopped_is_replaced_and_its_streams_go_on() -> None:
    """No limit is set here: with a minute's patience, this test would not end in time."""

    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], LONG)
            await until(lambda: bool(stream.token_ids))
            os.kill(client.engine_pids[0] or 0, signal.SIGSTOP)
            await until(lambda: client.status().engine.state == "restarting")
            assert "was stopped by a signal (SIGSTOP)" in (client.status().engine.reason or "")
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == LONG

    asyncio.run(asyncio.wait_for(scenario(), 50))


def test_a_rank_that_is_stopped_ends_its_engine_and_the_streams_go_on() -> None:
    async def scenario() -> None:
        config = replace(engine_config("mp", max_model_len=MAX_LENGTH), layout=Layout(tensor=2))
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], LONG)
            await until(lambda: bool(stream.token_ids))
            workers = psutil.Process(client.engine_pids[0]).children()
            assert len(workers) == 2
            workers[0].suspend()  # the one that reports
            await until(lambda: client.status().engine.state == "restarting")
            reason = client.status().engine.reason or ""
            assert "Stopped by a signal (SIGSTOP): Worker tp" in reason
            assert f"(pid {workers[0].pid})" in reason
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == LONG

    asyncio.run(asyncio.wait_for(scenario(), 50))


def test_a_step_that_hangs_is_noticed_and_its_stack_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its size was seen often, so the patience is short. One of the next engine's steps is no slower."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HANGS_ONCE", str(tmp_path / "hung"))

    async def scenario() -> None:
        async with client_of(launcher("tests.executor.doubles:HangingWorker")) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], 300)
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert client.status().engine.restarts == 1
            assert len(stream.token_ids) == 300

    asyncio.run(asyncio.wait_for(scenario(), 50))
    assert "in hang_here" in capfd.readouterr().err


def test_a_worker_that_is_stopped_while_nothing_runs_is_noticed() -> None:
    clock, stopped = Clock(), ["Worker tp1 (pid 7)"]
    watch = StepWatch(StepTimes(60.0, fixed=True), list, lambda: stopped, clock=clock.monotonic, idle_seconds=2.0)

    def look(seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            clock.now += 0.2
            watch.look()

    look(1.8)
    assert not watch.is_hung
    stopped.clear()
    look(0.2)
    stopped.append("Worker tp0 (pid 6)")
    look(1.8)
    with pytest.raises(EngineKilledError, match=r"SIGSTOP\): Worker tp0"):
        look(0.6)
    assert watch.is_hung


# ------------------------------------------------------------------------------------------------------------- limits


def test_limits_follow_the_slowest_recent_step_of_a_size() -> None:
    times = StepTimes(300.0, fixed=False)
    small, large = StepSize.of(1, 100), StepSize.of(512, 100)
    assert times.limit(small) == 300  # nothing is known
    for _ in range(3):
        times.add(small, 0.01)
    assert times.limit(small) == 1  # ten times 0.01 s would be less
    assert times.limit(large) == 60  # perhaps a kernel is compiled first
    times.add(small, 0.5)
    assert times.limit(small) == pytest.approx(5)
    for _ in range(300):
        times.add(small, 0.01)
    assert times.limit(small) == 1  # what was slow long ago counts no more
    times.add(small, 0.2)
    assert times.limit(large) == 300  # a size of 512 times as much may take ten times 512 times as long
    assert StepTimes(7.0, fixed=True).limit(small) == 7


@dataclass
class Clock:
    """Monotonic seconds."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


def verdict(watch: SilenceWatch, clock: Clock, seconds: float, *, is_busy: bool, tick: float = 0.2) -> str | None:
    """What the watch says of an engine that is silent for so long."""
    said, heard_at = None, clock.now
    watch.look(heard_at, is_busy=is_busy)
    while seconds > 0 and said is None:
        clock.now, seconds = clock.now + tick, seconds - tick
        found = watch.look(heard_at, is_busy=is_busy)
        said = found.reason if found is not None else None
    return said


def test_silence_counts_by_what_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process here is `sleep`: it does nothing, is not stopped, and has all the cores that it wants."""
    clock = Clock()
    monkeypatch.setattr(silence, "time", clock)
    child = psutil.Popen(["sleep", "1000"])
    try:
        watch = SilenceWatch(child.pid, None)
        assert verdict(watch, clock, 0.7, is_busy=True) is None
        assert "with requests in hand" in (verdict(watch, clock, 2, is_busy=True) or "")
        assert verdict(SilenceWatch(child.pid, None), clock, 50, is_busy=False) is None
        assert "silent for 60 s" in (verdict(SilenceWatch(child.pid, None), clock, 70, is_busy=False) or "")
        # Looks that come late: it is this process that stood still.
        assert verdict(SilenceWatch(child.pid, None), clock, 400, is_busy=True, tick=200) is None
        assert "silent for 3 s" in (verdict(SilenceWatch(child.pid, 3.0), clock, 10, is_busy=True) or "")
        child.suspend()
        while not is_stopped(child.pid):  # soon: the signal has been sent
            time.sleep(0.001)
        assert "SIGSTOP" in (verdict(SilenceWatch(child.pid, None), clock, 1, is_busy=True) or "")
        assert verdict(SilenceWatch(child.pid, None), clock, 4, is_busy=False) is None
        assert "SIGSTOP" in (verdict(SilenceWatch(child.pid, None), clock, 7, is_busy=False) or "")
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
    assert ActivityMeter(child.pid).look() == (0, 0, 0)


def test_an_engine_that_computes_in_silence_has_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(silence, "time", clock)
    monkeypatch.setattr(ActivityMeter, "look", lambda self: Activity(cpu_seconds=0.2))
    assert verdict(SilenceWatch(os.getpid(), None), clock, 9, is_busy=True) is None
    assert "silent for 10 s" in (verdict(SilenceWatch(os.getpid(), None), clock, 12, is_busy=True) or "")
    monkeypatch.setattr(ActivityMeter, "look", lambda self: Activity(starved_seconds=0.2))
    assert verdict(SilenceWatch(os.getpid(), None), clock, 600, is_busy=True) is None

"""The mp executor with real worker processes and no model."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from quire.core.errors import EngineError, ModelLoadError, PeerLostError
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import EngineReady
from quire.core.wire.rank import Layout
from quire.executor.processes import worker_host
from quire.executor.processes.cores import usable_cores
from quire.executor.processes.multiproc import MultiProcExecutor
from tests.core.scheduling.fake_worker import make_request
from tests.executor.doubles import make_config, make_plan, results_of, submit, token_of

ROOT = Path(__file__).parents[3]
NULL = "quire.executor.processes.null_worker:NullWorker"


@pytest.fixture(autouse=True)
def _doubles_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(limited())


def double(name: str) -> str:
    return f"tests.executor.doubles:{name}"


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "quire" in name}


@contextlib.asynccontextmanager
async def running(size: int, factory: str = NULL) -> AsyncIterator[tuple[MultiProcExecutor, EngineReady]]:
    executor = MultiProcExecutor(make_config(size), factory=factory)
    try:
        yield executor, await executor.start()
    finally:
        await executor.close(hung=False)


def test_results_come_in_the_order_of_plans() -> None:
    async def test() -> None:
        async with running(2) as (executor, ready):
            assert ready.block_size == 8
            assert ready.num_pages == 32
            assert ready.device_name == "null"
            # More than the ring holds, every tenth longer than a slot: submit must neither block nor lose any.
            for step in range(200):
                executor.submit(make_plan(step, 20_000 if step % 10 == 0 else 0))
            results = await results_of(executor, 200)
            assert [result.step_id for result in results] == list(range(200))
            assert [result.token_ids for result in results] == [token_of(step) for step in range(200)]

    run(test())


def test_stages_work_on_different_requests_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step ends before the next one has begun in the other stage, and still all of them end."""
    monkeypatch.setenv("MEETING", str(tmp_path))
    config = replace(make_config(), layout=Layout(pipeline=2), layers_by_stage=[1, 1], executor="mp")

    async def test() -> None:
        executor = MultiProcExecutor(config, factory=double("MeetingWorker"))
        try:
            ready = await executor.start()
            scheduler = Scheduler(
                config.limits, kv_groups=ready.kv_groups, num_pages=ready.num_pages, max_model_len=64,
                eos_token_ids=[], num_stages=2,
            )  # fmt: skip
            seen = []
            for step in range(12):
                while scheduler.num_in_flight < executor.depth:
                    for number in range(2 if step == 0 else 0):
                        scheduler.add(make_request(f"{len(seen)} {number}", 3, max_tokens=30))
                    plan = scheduler.schedule()
                    assert plan is not None
                    executor.submit(plan)
                    seen.append(set(plan.slots))
                scheduler.update(await executor.next_result())
            assert all(len(slots) == 2 for slots in seen)
            assert all(not one & other for one, other in itertools.pairwise(seen))
        finally:
            await executor.close(hung=False)

    run(test())


def test_the_last_stage_reports_and_every_rank_answers_a_call() -> None:
    config = replace(
        make_config(), layout=Layout(pipeline=2, tensor=2), layers_by_stage=[1, 1], executor="mp"
    )  # fmt: skip

    async def test() -> None:
        executor = MultiProcExecutor(config, factory=double("NotingWorker"))
        try:
            await executor.start()
            submit(executor, range(3))
            assert [result.token_ids for result in await results_of(executor, 3)] == [token_of(i) for i in range(3)]
            answers = await executor.call("note", b"")
            assert [answer.split()[0] for answer in answers] == [b"tp0", b"tp1", b"pp1-tp0", b"pp1-tp1"]
        finally:
            await executor.close(hung=False)

    run(test())


def test_every_rank_answers_a_call_after_the_steps_before_it() -> None:
    async def test() -> None:
        async with running(3, double("NotingWorker")) as (executor, _):
            submit(executor, range(2))
            answers = await executor.call("note", b"so")
            seen = b" so launch 0 collect 0 launch 1 collect 1"
            assert answers == [b"tp0" + seen, b"tp1" + seen, b"tp2" + seen]
            with pytest.raises(EngineError, match="Worker tp0: it was told to"):
                await executor.call("fail", b"")
            assert len(await results_of(executor, 2)) == 2

    run(test())


def test_a_worker_that_dies_fails_the_calls_in_flight_and_later_ones() -> None:
    async def test() -> None:
        before = child_pids()
        async with running(2, double("StuckWorker")) as (executor, _):
            submit(executor, [0])
            call = asyncio.create_task(executor.call("note", b""))
            await asyncio.sleep(0.05)
            os.kill(min(child_pids() - before), signal.SIGKILL)
            for waiting in (call, executor.call("note", b"")):
                with pytest.raises(EngineError, match="was killed by SIGKILL"):
                    await waiting

    run(test())


def test_all_ranks_allocate_what_the_smallest_can_hold() -> None:
    async def test() -> None:
        async with running(3, double("UnequalWorker")) as (executor, ready):
            assert (ready.num_pages, ready.max_model_len) == (60, 32)
            assert ready.weights_bytes == 30
            assert ready.kv_cache_bytes == 3 * 600  # every rank's page takes 10 bytes
            assert ready.kv_groups == [KVGroupSpec("full", [0], page_bytes=10)]
            submit(executor, [0])
            (result,) = await results_of(executor, 1)
            assert result.token_ids == [[60, 32]]

    run(test())


def test_ranks_whose_layers_keep_different_things_do_not_start() -> None:
    async def test() -> None:
        with pytest.raises(ModelLoadError, match=r"Worker tp1 declares other.*window=5.*window=4.*checkpoint"):
            async with running(2, double("OtherWindowWorker")):
                pass

    run(test())


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_worker_fails_every_step_with_its_name(rank: int) -> None:
    async def test() -> None:
        before = child_pids()
        async with running(2, double("StuckWorker")) as (executor, _):
            pids = sorted(child_pids() - before)
            submit(executor, range(3))
            await asyncio.sleep(0.05)
            os.kill(pids[rank], signal.SIGKILL)
            for step in range(3, 6):  # steps that come later fail like those in flight
                with pytest.raises(EngineError, match=rf"Worker tp{rank} \(pid {pids[rank]}\) was killed by SIGKILL"):
                    await executor.next_result()
                submit(executor, [step])

    run(test())


def test_a_worker_that_is_missed_is_blamed_if_it_is_one_of_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """Only engines that share experts may miss a worker of another one."""
    missed = r"Worker tp0 failed: a worker .* \(Connection closed by peer \[::1\]:7\)"

    async def test() -> None:
        for layout, kind, message in (
            (Layout(data=2, expert=2), PeerLostError, missed),
            (Layout(tensor=2), EngineError, "Worker tp1 .* ended with exit code 7"),
            (Layout(tensor=1), EngineError, missed),
        ):
            executor = MultiProcExecutor(replace(make_config(), layout=layout), factory=double("LonelyWorker"))
            try:
                await executor.start()
                submit(executor, range(4))
                with pytest.raises(EngineError, match=message) as raised:
                    await results_of(executor, 4)
                assert raised.type is kind
            finally:
                await executor.close(hung=False)

    run(test())
    assert "Traceback" not in capfd.readouterr().err


def test_failing_step_of_any_rank_fails_all_and_says_why() -> None:
    async def test() -> None:
        async with running(2, double("RaisingWorker")) as (executor, _):
            submit(executor, range(3))
            results = await results_of(executor, 3)
            assert [result.step_id for result in results] == [0, 1, 2]
            # Rank 0 still answers step 3: which of the two the executor hears first does not matter for step 4.
            submit(executor, [3])
            await asyncio.sleep(0.2)
            submit(executor, [4])
            with pytest.raises(EngineError, match="Worker tp1 failed: ValueError: three is too much"):
                await results_of(executor, 2)

    run(test())


def test_unreadable_checkpoint_is_a_load_error() -> None:
    async def test() -> None:
        with pytest.raises(ModelLoadError, match="cut short; download it again"):
            async with running(2, double("UnloadableWorker")):
                pass

    run(test())


def test_worker_that_ends_while_loading_is_an_engine_error() -> None:
    async def test() -> None:
        with pytest.raises(EngineError, match=r"Worker tp\d \(pid \d+\) ended with exit code 7"):
            async with running(2, double("ExitingWorker")):
                pass

    run(test())


def test_close_leaves_no_process_file_or_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def test() -> None:
        before = child_pids(), set(os.listdir("/proc/self/fd")), shared_memory_files()
        executor = MultiProcExecutor(make_config(2), factory=double("StuckWorker"))
        await executor.start()
        assert os.listdir(tmp_path) == []
        submit(executor, [0])
        await executor.close(hung=False)
        await executor.close(hung=False)
        with pytest.raises(EngineError, match="closed before this step was done"):
            await executor.next_result()
        assert (child_pids(), set(os.listdir("/proc/self/fd")), shared_memory_files()) == before

    run(test())


def test_worker_deaf_to_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "TERMINATE_GRACE_SECONDS", 0.3)

    async def test() -> None:
        before = child_pids()
        executor = MultiProcExecutor(make_config(1), factory=double("StubbornWorker"))
        await executor.start()
        submit(executor, [0])
        await asyncio.sleep(0.1)
        await executor.close(hung=False)
        assert child_pids() == before

    run(test())


def test_closing_on_a_hung_step_shows_where_it_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with running(2, double("StuckWorker")) as (executor, _):
            submit(executor, [0])
            await asyncio.sleep(0.1)
            await executor.close(hung=True)

    run(test())
    assert capfd.readouterr().err.count("in launch") == 2


def test_close_before_start_is_harmless() -> None:
    async def test() -> None:
        executor = MultiProcExecutor(make_config(2))
        await executor.close(hung=False)
        await executor.close(hung=False)
        submit(executor, [0])
        with pytest.raises(EngineError, match="closed"):
            await executor.next_result()

    before = child_pids()
    run(test())
    assert child_pids() == before


@pytest.mark.parametrize("setting", [None, "3"])
def test_cores_are_shared_out_and_interrupts_ignored(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)

    async def test() -> None:
        async with running(2, double("CoreWorker")) as (executor, _):
            submit(executor, [0])
            (result,) = await results_of(executor, 1)
            assert result.token_ids == [[int(setting or max(1, usable_cores() // 2)), 1]]

    run(test())


def test_workers_die_with_their_parent_and_need_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "user_script.py"  # without `if __name__ == "__main__"`
    script.write_text(
        textwrap.dedent("""
        import asyncio, psutil, sys
        from quire.executor.processes.multiproc import MultiProcExecutor
        from tests.executor.doubles import results_of, submit, make_config, make_plan

        async def main():
            executor = MultiProcExecutor(make_config(2), factory="tests.executor.doubles:StuckWorker")
            await executor.start()
            executor.submit(make_plan(0))
            assert "torch" not in sys.modules
            print(*[child.pid for child in psutil.Process().children()], flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """)
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []
    assert list(folder.iterdir()) == [], "nobody is left to tidy up"

"""The uni executor: one worker in a thread of this process."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Awaitable

import pytest

from quire.core.errors import EngineError, ModelLoadError
from quire.executor.processes import uniproc
from quire.executor.processes.uniproc import UniProcExecutor
from tests.executor.doubles import OnceStuckWorker, make_config, results_of, submit, token_of


def make_executor(factory: str) -> UniProcExecutor:
    return UniProcExecutor(make_config(), factory=f"tests.executor.doubles:{factory}")


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "worker"]


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(limited())


def test_results_come_in_the_order_of_plans_and_close_ends_the_thread() -> None:
    async def test() -> None:
        executor = make_executor("NullWorker")
        ready = await executor.start()
        assert (ready.num_pages, ready.block_size, ready.max_model_len) == (32, 8, 64)
        submit(executor, range(100))
        results = await results_of(executor, 100)
        assert [result.token_ids for result in results] == [token_of(step) for step in range(100)]
        assert len(worker_threads()) == 1
        await executor.close(hung=False)
        await executor.close(hung=False)
        assert worker_threads() == []

    run(test())


def test_what_is_imported_before_the_worker_is_made_is_frozen() -> None:
    """So the collection at the end of the start does not visit it."""

    async def test() -> None:
        executor = make_executor("FreezeCountingWorker")
        await executor.start()
        assert int((await executor.call("count", b""))[0]) > 0
        await executor.close(hung=False)

    gc.unfreeze()
    try:
        run(test())
    finally:
        gc.unfreeze()


def test_the_loop_stays_free_while_steps_run() -> None:
    async def test() -> None:
        executor = make_executor("SlowWorker")  # 20 ms a step
        await executor.start()
        submit(executor, range(10))
        results = asyncio.create_task(results_of(executor, 10))
        num_turns = 0
        while not results.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert num_turns > 30  # a loop that waits for each step has one or two turns between steps
        await executor.close(hung=False)

    run(test())


def test_a_call_is_answered_after_the_steps_before_it() -> None:
    async def test() -> None:
        executor = make_executor("NotingWorker")
        await executor.start()
        submit(executor, [0])
        assert await executor.call("note", b"so") == [b"tp0 so launch 0 collect 0"]
        with pytest.raises(EngineError, match="Worker tp0: it was told to"):
            await executor.call("fail", b"")
        submit(executor, [1])
        assert [result.step_id for result in await results_of(executor, 2)] == [0, 1]
        await executor.close(hung=False)
        with pytest.raises(EngineError, match="closed"):
            await executor.call("note", b"")

    run(test())


def test_failing_step_fails_it_and_all_later_ones() -> None:
    async def test() -> None:
        executor = make_executor("RaisingWorker")
        await executor.start()
        submit(executor, range(6))
        results = await results_of(executor, 3)
        assert [result.step_id for result in results] == [0, 1, 2]
        for step in range(6, 10):
            with pytest.raises(EngineError, match="failed in step 3: ValueError: three is too much"):
                await executor.next_result()
            submit(executor, [step])
        await executor.close(hung=False)

    run(test())


def test_unreadable_checkpoint_is_a_load_error() -> None:
    async def test() -> None:
        executor = make_executor("UnloadableWorker")
        with pytest.raises(ModelLoadError, match="cut short; download it again"):
            await executor.start()
        await executor.close(hung=False)
        assert worker_threads() == []

    run(test())


def test_other_failures_while_loading_are_engine_errors() -> None:
    async def test() -> None:
        executor = UniProcExecutor(make_config(), factory="tests.executor.doubles:NoSuchWorker")
        with pytest.raises(EngineError, match="failed to start: AttributeError"):
            await executor.start()
        await executor.close(hung=False)

    run(test())


def test_close_does_not_wait_for_ever_and_fails_what_is_in_flight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    monkeypatch.setattr(uniproc, "CLOSE_GRACE_SECONDS", 0.1)

    async def test() -> None:
        executor = make_executor("OnceStuckWorker")
        await executor.start()
        OnceStuckWorker.began.clear()
        submit(executor, range(2))
        await asyncio.to_thread(OnceStuckWorker.began.wait)
        await executor.close(hung=False)
        assert "is left behind" in caplog.text
        with pytest.raises(EngineError, match="closed before this step was done"):
            await executor.next_result()

    run(test())


def test_closing_on_a_hung_step_shows_where_it_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uniproc, "CLOSE_GRACE_SECONDS", 0.1)

    async def test() -> None:
        executor = make_executor("OnceStuckWorker")
        await executor.start()
        OnceStuckWorker.began.clear()
        submit(executor, [0])
        await asyncio.to_thread(OnceStuckWorker.began.wait)
        await executor.close(hung=True)

    run(test())
    assert "in launch" in capfd.readouterr().err


def test_importing_it_imports_no_torch() -> None:
    modules = "quire.executor.processes.uniproc, quire.executor.processes.multiproc"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

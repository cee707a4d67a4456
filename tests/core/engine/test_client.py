"""Engine client and engine process over real sockets, with a worker that answers at once instead of a model."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import psutil
import pytest

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.engine.client import EngineClient
from quire.core.errors import EngineDeadError, ModelLoadError
from quire.core.wire.protocol import EngineRequest, FinishReason, RequestDelta
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.launch.launcher import EngineLauncher

NULL_WORKER = "quire.executor.processes.null_worker:NullWorker"


def engine_config(executor: Literal["uni", "mp"] = "uni", max_model_len: int = 256) -> EngineConfig:
    spec = ModelSpec(
        path="", name="null", architecture="Null", hf_config={}, dtype="float32", vocab_size=1000, num_layers=1,
        num_attention_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, max_position_embeddings=max_model_len,
        eos_token_ids=[],
    )  # fmt: skip
    return EngineConfig(
        spec=spec,
        limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_reqs=16),
        load=LoadConfig(),
        cache=CacheConfig(),
        device="cpu",
        tensor_parallel_size=1,
        executor=executor,
        max_model_len=max_model_len,
        fit_max_model_len=False,
        seed=0,
    )


@asynccontextmanager
async def client_of(launcher: EngineLauncher) -> AsyncIterator[EngineClient]:
    client = EngineClient(launcher)
    try:
        yield client
    finally:
        await client.close()


class Stream:
    """Collects one request's deltas."""

    def __init__(self, client: EngineClient, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self.last: RequestDelta | None = None
        self.done = asyncio.Event()
        self.on_tokens: Callable[[], None] = lambda: None
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0)
        client.submit(EngineRequest(request_id, prompt, sampling), self._on_delta)

    def _on_delta(self, delta: RequestDelta) -> None:
        self.token_ids += delta.token_ids
        self.on_tokens()
        if delta.finish_reason is not None:
            self.last = delta
            self.done.set()

    async def finish_reason(self) -> FinishReason | None:
        async with asyncio.timeout(20):
            await self.done.wait()
        assert self.last is not None
        return self.last.finish_reason


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
        async with client_of(EngineLauncher(config, worker_factory=NULL_WORKER)) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2, 3], 8000)
            victim = client.engine_pid
            assert victim is not None

            def kill_once() -> None:
                if client.engine_pid == victim and len(stream.token_ids) > 5:
                    os.kill(victim, signal.SIGKILL)

            stream.on_tokens = kill_once
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert len(stream.token_ids) == 8000
            assert client.engine_pid != victim
            client.check_health()

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
            assert os.listdir(launcher.folder) == ["engine-1.sock"]
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
    assert not any(process.is_running() for process in started)

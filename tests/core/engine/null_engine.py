"""Engine processes for tests, with a worker that answers at once instead of a model, and requests to them."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.engine.client import EngineClient
from quire.core.engine.launcher import Launcher
from quire.core.wire.protocol import EngineRequest, FinishReason, RequestDelta, SequenceStart
from quire.core.wire.rank import Layout
from quire.core.wire.sampling_params import SamplingParams

NULL_WORKER = "quire.executor.processes.null_worker:NullWorker"


def engine_config(executor: Literal["uni", "mp"] = "uni", max_model_len: int = 256) -> EngineConfig:
    spec = ModelSpec(
        path="", name="null", architecture="Null", hf_config={}, dtype="float32", vocab_size=1000, num_layers=1,
        num_attention_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, max_position_embeddings=max_model_len,
        eos_token_ids=[], config_json={},
    )  # fmt: skip
    return EngineConfig(
        spec=spec,
        limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_reqs=16),
        load=LoadConfig(),
        cache=CacheConfig(),
        device="cpu",
        layout=Layout(),
        executor=executor,
        max_model_len=max_model_len,
        fit_max_model_len=False,
        seed=0,
    )


@asynccontextmanager
async def client_of(launcher: Launcher, **options: Any) -> AsyncIterator[EngineClient]:
    if (on_stats := options.pop("on_stats", None)) is not None:
        options["on_stats"] = lambda engine, stats: on_stats(stats)
    client = EngineClient([launcher], num_slots=8, **options)
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
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        client.submit(EngineRequest([SequenceStart(request_id, seed=1)], prompt, sampling), [self._on_delta])

    @property
    def is_failed(self) -> bool:
        return self.last is not None and self.last.failure is not None

    def _on_delta(self, delta: RequestDelta) -> None:
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.last = delta
            self.done.set()
        self.on_tokens()

    async def finish_reason(self) -> FinishReason | None:
        async with asyncio.timeout(60):
            await self.done.wait()
        assert self.last is not None
        return self.last.finish_reason


def kill_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has process groups that are killed live for a while, as with much memory."""

    def kill(group: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            at_once(group, number)

    at_once = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *group: threading.Timer(0.5, kill, group).start())

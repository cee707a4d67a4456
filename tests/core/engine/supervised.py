"""Engines that are killed and follow one another, streams that outlast them, and waits for what becomes of them."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from quire.core.engine.client import EngineClient
from quire.core.wire.protocol import FinishReason
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import NULL_WORKER, Stream, engine_config

MAX_LENGTH = 100_000
ENDLESS = 90_000  # tokens: more than any engine here produces before it is killed
LONG = 8000  # tokens: enough that a kill comes in the middle


def launcher(worker: str = NULL_WORKER) -> EngineLauncher:
    return EngineLauncher(engine_config(max_model_len=MAX_LENGTH), worker_factory=worker)


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


def open_pair(client: EngineClient, prompt: Sequence[int] = (1, 2)) -> list[Stream]:
    """Two sequences of one request: when one fails, the other is aborted, as by a frontend with n = 2."""
    pair = [Stream(client, name, list(prompt), ENDLESS) for name in ("a", "b")]
    for stream, sibling in zip(pair, ("b", "a"), strict=True):
        stream.on_tokens = lambda stream=stream, sibling=sibling: client.abort([sibling] if stream.is_failed else [])
    return pair

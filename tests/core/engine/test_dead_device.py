"""A device that computes nothing usable any more. Real processes."""

import asyncio
from pathlib import Path

import pytest

from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import EngineDeadError
from quire.core.wire.protocol import FinishReason
from tests.core.engine.null_engine import Stream, client_of
from tests.core.engine.supervised import launcher, until
from tests.executor.doubles import POISON

ROOT = Path(__file__).parents[3]
WORKER = "tests.executor.doubles:DeadDeviceWorker"


@pytest.fixture(autouse=True)
def _doubles_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_the_engine_is_restarted_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAD_DEVICE", str(tmp_path / "died"))

    async def scenario() -> None:
        async with client_of(launcher(WORKER)) as client:
            await client.start()
            streams = [Stream(client, f"request-{number}-0-0", [number], 400) for number in range(4)]
            for stream in streams:
                assert await stream.finish_reason() is FinishReason.LENGTH
                assert len(stream.token_ids) == 400
            assert client.status().engine.restarts == 1

    asyncio.run(scenario())


def test_engines_that_never_compute_anything_are_given_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAD_DEVICE", "always")

    async def scenario() -> None:
        policy = RestartPolicy(max_fruitless_runs=0)
        async with client_of(launcher(WORKER), restarts=lambda: policy) as client:
            await client.start()
            streams = [Stream(client, f"request-{number}-0-0", [number], 400) for number in range(4)]
            for stream in streams:
                assert await stream.finish_reason() is FinishReason.ERROR
            await until(lambda: client.status().engine.state == "dead")
            with pytest.raises(EngineDeadError, match="the device or the weights are at fault"):
                client.check_health()

    asyncio.run(scenario())


def test_one_client_whose_prompts_overflow_does_not_end_an_engine() -> None:
    """Each comes again, as a client does that was told 500; a prompt that was fine tells that the device is."""

    async def scenario() -> None:
        async with client_of(launcher("tests.executor.doubles:OverflowingWorker")) as client:
            await client.start()
            for turn in range(3):
                assert await Stream(client, f"good-{turn}-0-0", [1, 2], 5).finish_reason() is FinishReason.LENGTH
                poisoned = [Stream(client, f"bad-{turn}-{number}-0", [POISON, number], 5) for number in range(12)]
                for stream in poisoned:
                    assert await stream.finish_reason() is FinishReason.ERROR
            assert client.status().engine.restarts == 0

    asyncio.run(scenario())

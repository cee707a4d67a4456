"""Several engine processes behind one client: where requests go, and what happens when engines die. No model."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from msgspec.structs import replace

from quire.core.engine.client import EngineClient
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import EngineDeadError
from quire.core.routing.router import RoutingRules
from quire.core.wire.protocol import EngineRequest, FinishReason, SchedulerStats, SequenceStart
from quire.core.wire.rank import EnginePlace, Layout
from quire.core.wire.sampling_params import SamplingParams
from quire.frontend.launch.launcher import EngineLauncher
from quire.frontend.launch.shared_experts import EpochCoordinator
from tests.core.engine.null_engine import NULL_WORKER, Stream, engine_config

ROOT = Path(__file__).parents[3]
MAX_LENGTH = 100_000
ENDLESS = 90_000


def launchers(
    number: int = 2,
    num_pages: int | None = None,
    max_model_len: int = MAX_LENGTH,
    together: EpochCoordinator | None = None,
    worker: str = NULL_WORKER,
    caching: bool = True,
) -> list[EngineLauncher]:
    config = replace(
        engine_config(max_model_len=max_model_len), layout=Layout(data=number, expert=1 if together is None else number)
    )
    config = replace(config, limits=replace(config.limits, enable_prefix_caching=caching))
    config = replace(config, cache=replace(config.cache, num_gpu_blocks_override=num_pages))
    if together is not None:
        config = replace(config, executor="mp")
    places = [EnginePlace(rank, rank, number) for rank in range(number)]
    return [EngineLauncher(replace(config, place=place), worker_factory=worker, epochs=together) for place in places]


@asynccontextmanager
async def fleet(engines: list[EngineLauncher], **options: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(engines, **{"num_slots": 8, **options})  # type: ignore[arg-type]
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def end(client: EngineClient, engine: int, number: signal.Signals = signal.SIGKILL) -> None:
    pid = client.engine_pids[engine]
    assert pid is not None
    os.kill(pid, number)


def placed(client: EngineClient, length: int) -> int:
    """The engine that gets a prompt of so many tokens, which nobody waits for."""
    request = EngineRequest([SequenceStart(uuid4().hex, seed=0)], [7] * length, SamplingParams(max_tokens=1))
    return client.submit(request, [lambda delta: None])


def test_requests_are_divided_and_followed_on_the_engine_that_has_them() -> None:
    async def scenario() -> None:
        stats: dict[int, SchedulerStats] = {}
        async with fleet(launchers(), on_stats=stats.__setitem__) as client:
            assert client.status().engine.state == "serving"
            assert [each.state for each in client.status().engines] == ["serving", "serving"]
            assert len(set(client.engine_pids)) == 2
            streams = [Stream(client, f"{number}", [number] * 20, 10) for number in range(6)]
            assert {await stream.finish_reason() for stream in streams} == {FinishReason.LENGTH}
            await until(lambda: sum(each.num_generated_tokens for each in stats.values()) == 60)
            assert [stats[engine].num_generated_tokens for engine in (0, 1)] == [30, 30]
            endless = [Stream(client, f"endless {number}", [number] * 20, ENDLESS) for number in range(2)]
            await until(lambda: all(each.num_running for each in stats.values()))
            client.abort(["endless 0", "endless 1"])
            await until(lambda: not any(each.num_running for each in stats.values()))
            assert all(each.last is None for each in endless)
            assert await client.reset_prefix_cache()
            assert [placed(client, length) for length in (5000, 20, 20, 20)] == [0, 1, 1, 1]  # its prompt takes long

    asyncio.run(scenario())


def test_streams_of_a_dead_engine_go_on_elsewhere_while_it_is_restarted() -> None:
    async def scenario() -> None:
        async with fleet(launchers()) as client:
            streams = [Stream(client, f"{number}", [1, 2], 8000) for number in range(2)]
            await until(lambda: all(stream.token_ids for stream in streams))
            victim = client.engine_pids[1]
            end(client, 0, signal.SIGSTOP)  # a hung engine does nothing, and its streams wait
            end(client, 0)
            await until(lambda: client.status().engines[0].state == "restarting")
            assert client.status().engine.state == "serving"
            assert "engine 0 is restarting" in (client.status().engine.reason or "")
            assert [await stream.finish_reason() for stream in streams] == [FinishReason.LENGTH] * 2
            assert [len(stream.token_ids) for stream in streams] == [8000, 8000]
            assert client.engine_pids[1] == victim
            await until(lambda: client.status().engine.reason is None)
            assert await Stream(client, "next", [3], 3).finish_reason() is FinishReason.LENGTH

    asyncio.run(scenario())


def test_streams_stay_where_the_other_engines_are_full() -> None:
    async def scenario() -> None:
        async with fleet(launchers(), num_slots=1) as client:
            streams = [Stream(client, f"{number}", [number] * 640, ENDLESS) for number in (6, 7)]
            await until(lambda: all(stream.token_ids for stream in streams))
            end(client, 1)
            await until(lambda: client.status().engines[1].state == "restarting")
            streams[1].token_ids.clear()
            await until(lambda: client.status().engines[1].state == "serving")
            await until(lambda: bool(streams[1].token_ids))
            assert [placed(client, length) for length in (20, 640)] == [1, 1]  # busier, it has the prompt in its cache
            end(client, 0)  # a first crash for its stream, and none for the other
            await until(lambda: client.status().engines[0].state == "restarting")
            assert not any(stream.is_failed for stream in streams)

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_both_engines_end_at_once_and_no_stream_is_lost(number: signal.Signals) -> None:
    """Whether somebody outside has ended them, or they crashed by themselves."""

    async def scenario() -> None:
        async with fleet(launchers()) as client:
            streams = [Stream(client, f"{number}", [1, number], 3000) for number in range(16)]
            await until(lambda: sum(bool(stream.token_ids) for stream in streams) > 4)
            for engine in (0, 1):
                end(client, engine, number)
            assert {await stream.finish_reason() for stream in streams} == {FinishReason.LENGTH}
            assert {len(stream.token_ids) for stream in streams} == {3000}

    asyncio.run(scenario())


def test_the_others_serve_on_when_one_engine_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fleet(launchers(), restarts=lambda: RestartPolicy(max_fruitless_runs=-1), num_slots=1) as client:
            streams = [Stream(client, f"{number}", [number], 8000) for number in range(2)]
            await until(lambda: all(stream.token_ids for stream in streams))
            end(client, 0)
            await until(lambda: client.status().engines[0].state == "dead")
            client.check_health()
            assert [await stream.finish_reason() for stream in streams] == [FinishReason.LENGTH] * 2  # even where full
            assert await Stream(client, "next", [3], 3).finish_reason() is FinishReason.LENGTH
            end(client, 1)
            await until(lambda: client.status().engine.state == "dead")
            with pytest.raises(EngineDeadError):
                client.check_health()

    asyncio.run(scenario())
    assert "engine 0 is gone for good, and the others serve on" in caplog.text


def test_engines_that_share_experts_are_restarted_together() -> None:
    """Their streams wait, and go on as often as it happens."""

    async def scenario() -> None:
        async with fleet(launchers(together=EpochCoordinator()), coupled=True) as client:
            streams = [Stream(client, f"{number}", [number], ENDLESS) for number in range(2)]
            for _ in range(2):
                await until(lambda: all(stream.token_ids for stream in streams))
                before = client.engine_pids
                end(client, 0)
                await until(lambda: client.status().engines[1].state == "restarting")
                reason = str(client.status().engines[1].reason)
                assert "engine 0, with which this one shares experts, has ended" in reason
                for stream in streams:
                    stream.token_ids.clear()
                await until(lambda: client.status().engine.reason is None)
                assert not set(before) & set(client.engine_pids)
            await until(lambda: all(stream.token_ids for stream in streams))
            assert not any(stream.is_failed for stream in streams)

    asyncio.run(scenario())


def is_each(client: EngineClient, state: str) -> bool:
    return {engine.state for engine in client.status().engines} == {state}


def test_requests_of_engines_that_miss_another_are_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine 1 ends first each time, because its worker has lost a peer. Nothing else happens to engine 0."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOST_PEER", str(sign := tmp_path / "lost"))

    async def scenario() -> None:
        engines = launchers(together=EpochCoordinator(), worker="tests.executor.doubles:SometimesLonelyWorker")
        async with fleet(engines, coupled=True) as client:
            streams = [Stream(client, f"{number}", [number], ENDLESS) for number in range(2)]
            for _ in range(3):
                await until(lambda: all(stream.token_ids for stream in streams))
                sign.touch()
                for state in ("restarting", "serving"):
                    await until(partial(is_each, client, state))
                for stream in streams:
                    stream.token_ids.clear()
            await until(lambda: all(stream.token_ids for stream in streams))

    asyncio.run(scenario())


def test_engines_that_share_experts_are_given_up_together() -> None:
    async def scenario() -> None:
        engines, limits = (
            launchers(together=EpochCoordinator()),
            iter([RestartPolicy(max_fruitless_runs=-1), RestartPolicy()]),
        )
        async with fleet(engines, restarts=lambda: next(limits), coupled=True) as client:
            streams = [Stream(client, f"{number}", [number], ENDLESS) for number in range(2)]
            await until(lambda: all(stream.token_ids for stream in streams))
            end(client, 0)
            assert {await stream.finish_reason() for stream in streams} == {FinishReason.ERROR}
            assert [each.state for each in client.status().engines] == ["dead", "dead"]

    asyncio.run(scenario())


def hits(engines: list[EngineLauncher], rules: RoutingRules | None = None) -> int:
    """Tokens that the prefix caches had for 160 requests, which draw one of eight prefixes of 2,000 tokens each."""
    prefixes = [[each * 31 % 997 for each in range(number, number + 2000)] for number in range(0, 800, 100)]
    draw = random.Random(1)

    async def scenario() -> int:
        stats: dict[int, SchedulerStats] = {}
        async with fleet(engines, on_stats=stats.__setitem__, rules=rules) as client:
            for start in range(0, 160, 4):
                prompts = [[*draw.choice(prefixes), number] for number in range(start, start + 4)]
                for stream in [Stream(client, f"{prompt[-1]}", prompt, 2) for prompt in prompts]:
                    assert await stream.finish_reason() is FinishReason.LENGTH
            await until(lambda: sum(each.num_generated_tokens for each in stats.values()) == 320)
        return sum(each.prefix_cache_hits for each in stats.values())

    return asyncio.run(scenario())


def test_two_engines_find_nine_tenths_of_what_one_of_their_size_finds() -> None:
    """Each of the two has room for five of the eight prefixes and a little more, and the one for all of them."""
    room = 5 * 2000 // 16 + 50
    one = hits(launchers(1, num_pages=2 * room, max_model_len=2100))
    two = hits(launchers(2, num_pages=room, max_model_len=2100))
    by_load = RoutingRules(follows_prefixes=False)
    two_by_load = hits(launchers(2, num_pages=room, max_model_len=2100), by_load)
    assert one == 152 * 2000
    assert two >= 0.9 * one
    assert two_by_load < 0.9 * one


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("worker", [NULL_WORKER, "tests.executor.doubles:WholePromptWorker"])
def test_a_prompt_that_was_sent_before_draws_none_to_an_engine_that_keeps_no_prefixes(
    worker: str, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def scenario() -> None:
        stats: dict[int, SchedulerStats] = {}
        engines = launchers(worker=worker, caching=caching)
        async with fleet(engines, on_stats=stats.__setitem__) as client:
            keeps = caching and worker == NULL_WORKER
            assert [each.caches_prefixes for each in client.ready] == [keeps] * 2
            for number in range(4):
                assert await Stream(client, f"{number}", list(range(64)), 1).finish_reason() is FinishReason.LENGTH
            await until(lambda: sum(each.num_generated_tokens for each in stats.values()) == 4)
        assert max(each.num_generated_tokens for each in stats.values()) == (4 if keeps else 2)

    asyncio.run(scenario())

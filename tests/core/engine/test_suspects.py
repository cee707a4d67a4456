"""Requests that engines do not survive, and the others beside them. Real processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from quire.core.engine.client import EngineClient
from quire.core.engine.restart_policy import RestartPolicy
from quire.core.errors import EngineDeadError
from quire.core.wire.protocol import FinishReason
from quire.core.wire.rank import Layout
from quire.frontend.launch.launcher import EngineLauncher
from tests.core.engine.null_engine import Stream, client_of, engine_config
from tests.core.engine.supervised import ENDLESS, LONG, MAX_LENGTH, answers, kill, launcher, open_pair, until
from tests.executor.doubles import POISON

ROOT = Path(__file__).parents[3]
WORKER = "tests.executor.doubles:PoisonWorker"


@pytest.fixture(autouse=True)
def _doubles_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("how", ["raise", "crash"])
def test_a_request_that_engines_do_not_survive_fails_and_the_others_are_finished(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried alone before it is refused, and none of the others is blamed for crashes beside it."""
    monkeypatch.setenv("POISON", how)
    replays: list[int] = []
    pauses: list[float] = []

    async def scenario() -> None:
        options = {"on_replay": replays.append, "on_pause": lambda engine, seconds: pauses.append(seconds)}
        async with client_of(launcher(WORKER), **options) as client:
            await client.start()
            before = [Stream(client, f"before {number}", [number], 400) for number in range(2)]
            await until(lambda: all(stream.token_ids for stream in before))
            poison = Stream(client, "poison", [POISON, 1], 5)
            after = [Stream(client, f"after {number}", [number], 5) for number in range(2)]
            assert await poison.finish_reason() is FinishReason.ERROR
            assert poison.last is not None
            assert poison.last.failure is not None
            assert "crashed 3 times while it had this request, at last as it tried it alone" in (
                poison.last.failure.message
            )
            for stream in before + after:
                assert await stream.finish_reason() is FinishReason.LENGTH
            assert [len(stream.token_ids) for stream in before + after] == [400, 400, 5, 5]
            assert client.status().engine.restarts == 3
            assert len(replays) >= 2 * 3
            assert len(pauses) >= 4
            assert min(pauses) > 0
            assert client.num_unfinished == 0

    asyncio.run(scenario())


def test_a_request_for_which_one_rank_has_too_little_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks end together, so that none is a step ahead, and the other requests go on in the next engine."""
    monkeypatch.setenv("POISON", "raise")
    config = replace(engine_config("mp", max_model_len=MAX_LENGTH), layout=Layout(tensor=2))

    async def scenario() -> None:
        launcher = EngineLauncher(config, worker_factory="tests.executor.doubles:ShortRankWorker")
        async with client_of(launcher) as client:
            await client.start()
            others = [Stream(client, f"other {number}", [number], 400) for number in range(2)]
            await until(lambda: all(stream.token_ids for stream in others))
            poison = Stream(client, "poison", [POISON, 1], 5)
            assert await poison.finish_reason() is FinishReason.ERROR
            for stream in others:
                assert await stream.finish_reason() is FinishReason.LENGTH
                assert len(stream.token_ids) == 400
            assert client.status().engine.restarts == 3

    asyncio.run(scenario())


def test_both_sequences_of_a_request_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISON", "raise")

    async def scenario() -> None:
        async with client_of(launcher(WORKER)) as client:
            await client.start()
            first, second = open_pair(client, [POISON])
            assert await first.finish_reason() is FinishReason.ERROR
            assert second.last is None
            assert client.num_unfinished == 0
            assert await answers(client)

    asyncio.run(scenario())


def test_a_stream_outlasts_any_number_of_kills() -> None:
    """Somebody outside ends the engine, which is no fault of the request, whether it gets tokens in between or not."""

    async def scenario() -> None:
        async with client_of(launcher()) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], LONG)
            for number in range(4):
                if number < 2:
                    await until(lambda: bool(stream.token_ids))
                await kill(client)
            assert await stream.finish_reason() is FinishReason.LENGTH
            assert stream.token_ids == [(2 + place) % 1000 for place in range(LONG)]
            assert client.status().engine.restarts == 4

    asyncio.run(scenario())


def test_both_engines_may_be_killed_at_once_and_again() -> None:
    async def scenario() -> None:
        client = EngineClient([launcher(), launcher()], num_slots=8)
        try:
            await client.start()
            streams = [Stream(client, f"{number}", [number], LONG) for number in range(6)]
            for _ in range(2):
                lengths = [len(stream.token_ids) for stream in streams]
                await until(
                    lambda lengths=lengths: all(
                        len(each.token_ids) > old for each, old in zip(streams, lengths, strict=True)
                    )
                )
                before = set(client.engine_pids)
                for pid in before:
                    os.kill(pid or 0, signal.SIGKILL)
                await until(lambda before=before: not before & {*client.engine_pids, None})
            for stream in streams:
                assert await stream.finish_reason() is FinishReason.LENGTH
                assert len(stream.token_ids) == LONG
        finally:
            await client.close()

    asyncio.run(scenario())


def test_a_request_on_trial_may_be_aborted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISON", "hang")
    monkeypatch.setenv("QUIRE_ENGINE_ITERATION_TIMEOUT_S", "1.5")

    async def scenario() -> None:
        async with client_of(launcher(WORKER)) as client:
            await client.start()
            Stream(client, "poison", [POISON], 5)
            other = Stream(client, "other", [1], 5)
            await until(lambda: client.status().engine.restarts >= 2)
            await until(lambda: client.status().engine.state == "serving")
            client.abort(["poison"])
            assert await other.finish_reason() is FinishReason.LENGTH

    asyncio.run(scenario())


@pytest.mark.parametrize(("steps", "reason"), [("20", FinishReason.LENGTH), ("20 40", FinishReason.ERROR)])
def test_a_request_whose_values_were_unusable_is_tried_again_once(
    steps: str, reason: FinishReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may have been at fault; if that was not all, the request fails."""
    monkeypatch.setenv("UNUSABLE", steps)

    async def scenario() -> None:
        async with client_of(launcher("tests.executor.doubles:UnusableWorker")) as client:
            await client.start()
            stream = Stream(client, "a", [1, 2], 200)
            assert await stream.finish_reason() is reason
            assert stream.token_ids == [(2 + place) % 1000 for place in range(len(stream.token_ids))]
            assert (len(stream.token_ids) == 200) is (reason is FinishReason.LENGTH)
            assert client.num_unfinished == 0
            assert client.status().engine.restarts == 0

    asyncio.run(scenario())


def test_engines_that_crash_with_work_and_no_output_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISON", "crash")

    async def scenario() -> None:
        policy = RestartPolicy(max_fruitless_runs=0)
        async with client_of(launcher(WORKER), restarts=lambda: policy) as client:
            await client.start()
            pair = open_pair(client, [POISON])
            assert await pair[0].finish_reason() is FinishReason.ERROR
            assert pair[0].last is not None
            assert pair[0].last.failure is not None
            assert "signal 11" in pair[0].last.failure.message
            assert client.num_unfinished == 0
            with pytest.raises(EngineDeadError, match="without output"):
                client.check_health()

    asyncio.run(scenario())


def test_a_limit_on_restarts_ends_them_with_the_reason() -> None:
    async def scenario() -> None:
        policy = RestartPolicy(max_restarts=1, window_seconds=600)
        async with client_of(launcher(), restarts=lambda: policy) as client:
            await client.start()
            stream = Stream(client, "a", [1], ENDLESS)
            await kill(client)
            os.kill(client.engine_pids[0] or 0, signal.SIGKILL)
            assert await stream.finish_reason() is FinishReason.ERROR
            with pytest.raises(EngineDeadError, match=r"signal 9.*--max-restarts allows 1"):
                client.check_health()

    asyncio.run(scenario())

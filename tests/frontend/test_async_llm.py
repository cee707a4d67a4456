"""`AsyncLLM` on a real engine: streams, aborts, many requests at once, and the engine's death."""

import asyncio
import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, BeamSearchParams, SamplingParams
from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError, EngineDeadError, OverloadedError, ParameterError
from quire.core.wire.sampling_params import RequestOutputKind
from quire.frontend.launch.event_loop import EventLoopThread
from quire.frontend.requests.request_builder import child_seed
from quire.frontend.requests.submission import Submission

DELTA = RequestOutputKind.DELTA
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=DELTA)
LONG = GREEDY.replace(max_tokens=1500)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine on the event loop that all tests of this module share with the engine's client."""
    thread = EventLoopThread("tests")
    yield thread.run
    thread.close()


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path], run: Run) -> Iterator[AsyncLLM]:
    options = {"max_num_seqs": 4, "max_num_queued_reqs": 100, "num_gpu_blocks_override": 512}
    llm = AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu", **options)
    yield llm
    run(llm.aclose())
    llm.shutdown()


async def collect(llm: AsyncLLM, request_id: str, prompt="Hello", sampling: SamplingParams = GREEDY) -> list:
    return [output async for output in llm.generate(prompt, sampling, request_id)]


async def idle(llm: AsyncLLM) -> None:
    """Waits until the engine has no running request."""
    assert llm.metrics is not None
    async with asyncio.timeout(60):
        while llm.metrics.engines[0].stats.num_running or llm.metrics.num_waiting or llm.num_unfinished:
            await asyncio.sleep(0.05)


def test_deltas_join_up_to_the_final_output(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        deltas = await collect(llm, "deltas")
        [final] = await collect(llm, "final", sampling=GREEDY.replace(output_kind=RequestOutputKind.FINAL_ONLY))
        growing = await collect(llm, "growing", sampling=GREEDY.replace(output_kind=RequestOutputKind.CUMULATIVE))
        assert [each.finished for each in deltas] == [False] * (len(deltas) - 1) + [True]
        assert "".join(each.outputs[0].text for each in deltas) == final.outputs[0].text
        token_ids = [token_id for each in deltas for token_id in each.outputs[0].token_ids]
        assert token_ids == final.outputs[0].token_ids
        texts = [each.outputs[0].text for each in growing]
        assert texts[-1] == final.outputs[0].text
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert final.request_id == "final"
        stream = llm.generate("Hello", LONG, "early")
        assert not (await anext(stream)).finished
        await stream.aclose()

    run(work())


def test_many_requests_at_once_each_get_their_own_tokens(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        alone = [await collect(llm, f"alone-{i}", [5 + i, 9]) for i in range(3)]
        together = await asyncio.gather(*(collect(llm, f"together-{i}", [5 + i % 3, 9]) for i in range(12)))
        texts = ["".join(each.outputs[0].text for each in outputs) for outputs in alone]
        for i, outputs in enumerate(together):
            assert "".join(each.outputs[0].text for each in outputs) == texts[i % 3]

    run(work())


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_a_reader_that_leaves_frees_the_engine(llm: AsyncLLM, run: Run, how: str) -> None:
    async def work() -> None:
        stream = llm.generate("Hello", LONG, "leaving")
        first = await anext(stream)
        assert not first.finished
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.ensure_future(collect(llm, "other", sampling=LONG))
            await asyncio.sleep(0.2)
            task.cancel()
            await stream.aclose()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await llm.abort(["leaving", "unknown"])
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].finish_reason == "abort"
        assert llm.num_unfinished == 0
        await idle(llm)

    run(work())


def test_wrong_requests_are_refused_before_the_engine_sees_them(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        for prompt, sampling, said in (
            ("Hello", GREEDY.replace(max_tokens=5000), "max_tokens asks for 5000"),
            ("", GREEDY, "empty"),
            ("Hello", GREEDY.replace(logprobs=21), "at most 20"),
        ):
            with pytest.raises(ParameterError, match=said):
                await llm.open_stream(Submission(prompt, sampling, "wrong"))
        stream = await llm.open_stream(Submission("Hello", LONG, "twice"))
        with pytest.raises(ParameterError, match="'twice' is in use"):
            await llm.open_stream(Submission("Hello", GREEDY, "twice"))
        stream.close()
        await llm.check_health()

    run(work())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *(({"request_id": value}, "request_id") for value in (5, None, uuid.UUID(int=1), b"a", "\ud800")),
        *(({"cache_salt": value}, "cache_salt") for value in (5, "", b"a", "\ud800", "x" * 2000)),
        *(({"priority": value}, "priority") for value in ("high", 1.5, 2**70, True)),
        *(({"prompt": value}, "prompt") for value in (5, None, [1, "a"], [1, 2.0], [True], {}, {"prompt": 5}, b"a")),
        *(({"prompt": value}, "prompt") for value in ({"prompt_token_ids": "abc"}, {"prompt_token_ids": [None]})),
        ({"prompt": {"prompt": "a", "cache_salt": 5}}, "cache_salt"),
        ({"prompt": {"prompt_token_ids": [5], "cache_salt": ["a"]}}, "cache_salt"),
        ({"sampling_params": {"max_tokens": 3}}, "params"),
        ({"sampling_params": BeamSearchParams(2, 3)}, "params"),
        ({"trace_headers": {"traceparent": "x"}}, "trace_headers"),
        ({"tokenization_kwargs": {"truncate_prompt_tokens": "3"}}, "tokenization_kwargs"),
        ({"tokenization_kwargs": {"truncation_side": "up"}}, "tokenization_kwargs"),
        ({"data_parallel_rank": "first"}, "data_parallel_rank"),
    ],
    ids=repr,
)
def test_arguments_of_a_wrong_type_are_refused_at_once(
    llm: AsyncLLM, run: Run, changes: dict[str, Any], param: str
) -> None:
    arguments = {"prompt": "Hello", "sampling_params": GREEDY, "request_id": "odd", **changes}

    async def work() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(ParameterError) as caught:
                await anext(llm.generate(**arguments))
            assert caught.value.param == param

    run(work())


def test_parameters_that_were_changed_are_checked_again(llm: AsyncLLM, run: Run) -> None:
    sampling = GREEDY.clone()
    sampling.ignore_eos = "yes"  # type: ignore[assignment]

    async def work() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(ParameterError, match="ignore_eos"):
                await collect(llm, "odd", sampling=sampling)
            with pytest.raises(ParameterError, match="BeamSearchParams, not SamplingParams"):
                await llm.open_beams(Submission("Hello", GREEDY, "odd"))  # type: ignore[arg-type]
            with pytest.raises(ParameterError, match="request_id must be a string"):
                await llm.open_beams(Submission("Hello", BeamSearchParams(2, 3), 5))  # type: ignore[arg-type]
            assert await collect(llm, "odd")

    run(work())


@pytest.mark.parametrize(
    "values",
    [
        {"ignore_eos": "yes"},
        {"length_penalty": "long"},
        {"stop_token_ids": ["a"]},
        {"skip_special_tokens": "x"},
        {"shown_special_token_ids": 5},
        {"temperature": None},
    ],
    ids=repr,
)
def test_beams_of_a_wrong_type(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        BeamSearchParams(2, 3, **values)
    assert caught.value.param == next(iter(values))


def test_a_full_queue_says_when_to_come_back(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        streams = [await llm.open_stream(Submission([5, 6], LONG, f"flood-{i}")) for i in range(130)]
        results = await asyncio.gather(*(anext(stream) for stream in streams[104:]), return_exceptions=True)
        for stream in streams:
            stream.close()
        refused = [each for each in results if isinstance(each, OverloadedError)]
        assert refused
        assert all(each.retry_after_seconds > 0 for each in refused)
        await idle(llm)

    run(work())


def test_metrics_count_requests(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        assert llm.metrics is not None
        metrics = llm.metrics.requests[0]
        before = metrics.generation_tokens, metrics.prompt_tokens
        await collect(llm, "counted", [5, 6, 7])
        assert (metrics.generation_tokens - before[0], metrics.prompt_tokens - before[1]) == (12, 3)

    run(work())


def test_streams_survive_the_engines_death(llm: AsyncLLM, run: Run) -> None:
    async def work() -> None:
        sampling = LONG.replace(max_tokens=200)
        expected = "".join(each.outputs[0].text for each in await collect(llm, "undisturbed", sampling=sampling))
        texts = []
        async for output in llm.generate("Hello", sampling, "disturbed"):
            texts.append(output.outputs[0].text)
            if len(texts) == 5:
                assert llm.client.engine_pids[0]
                os.kill(llm.client.engine_pids[0], signal.SIGKILL)
        assert "".join(texts) == expected

    run(work())


def test_n_sequences_are_n_requests_with_their_seeds_though_the_engine_dies(llm: AsyncLLM, run: Run) -> None:
    n, sampling = 6, LONG.replace(max_tokens=150, temperature=1.0, seed=7)  # four of them run at a time

    async def work() -> None:
        expected = [
            (await collect(llm, f"alone-{index}", sampling=sampling.replace(seed=child_seed(7, index))))
            for index in range(n)
        ]
        texts, killed = [""] * n, False
        async for output in llm.generate("Hello", sampling.replace(n=n), "together"):
            for each in output.outputs:
                texts[each.index] += each.text
            if not killed and all(texts[:4]):
                assert llm.client.engine_pids[0]
                os.kill(llm.client.engine_pids[0], signal.SIGKILL)
                killed = True
        assert killed
        assert texts == ["".join(each.outputs[0].text for each in outputs) for outputs in expected]

    run(work())


def test_options_come_in_groups_or_as_keywords_but_not_both() -> None:
    with pytest.raises(ConfigError, match="not both"):
        AsyncLLM.from_engine_args(EngineArgs(), model="x")


def test_after_shutdown_requests_fail_and_nothing_is_left(checkpoint: Callable[..., Path], run: Run) -> None:
    async def work() -> None:
        async with AsyncLLM.from_engine_args(model=str(checkpoint("llama")), device="cpu") as llm:
            running = asyncio.ensure_future(collect(llm, "running", sampling=LONG.replace(n=64)))
            await asyncio.sleep(0.3)
            pid = llm.client.engine_pids[0]
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        assert llm.errored
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, "late")
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}")

    run(work())

"""Two engines that hold one set of experts, against one engine with all of them."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from tests.hosts import TOKEN, start_node
from tests.servers import free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 256}
EPLB = {"step_interval": 20, "window_size": 10, "num_redundant_experts": 3, "log_balancedness": True}
PROMPTS = [list(range(start, start + size)) for start, size in ((5, 20), (40, 90), (80, 3), (7, 60))]
LENGTHS = [300, 40, 200, 5]


def sampling(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=number, max_tokens=LENGTHS[number], ignore_eos=True)


def worker_of(engine: int) -> psutil.Process:
    """The first one of an engine."""
    workers = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("quire-")]
    return next(each for each in workers if each.name().startswith("quire-dp1") == bool(engine))


class Together:
    """The engines and the tokens that their requests should have."""

    def __init__(self, llm: AsyncLLM, expected: list[list[int]]) -> None:
        self._llm = llm
        self._expected = expected
        self._num_requests = 0

    async def parts(self, number: int, engine: int) -> AsyncIterator[list[int]]:
        """The tokens so far of one request on an engine."""
        self._num_requests += 1
        prompt = {"prompt_token_ids": PROMPTS[number]}
        stream = self._llm.generate(prompt, sampling(number), f"{self._num_requests}", data_parallel_rank=engine)
        async for output in stream:
            yield output.outputs[0].token_ids

    async def check(self, number: int, engine: int, on_half: Callable[[], None] = lambda: None) -> None:
        """Runs one request; `on_half` is called when it has half of its tokens."""
        waiting: list[Callable[[], None]] = [on_half]
        async for token_ids in self.parts(number, engine):
            if waiting and len(token_ids) > LENGTHS[number] // 2:
                waiting.pop()()
        assert token_ids == self._expected[number], (number, engine)

    async def abort(self, number: int, engine: int) -> None:
        """Leaves a request after its first tokens."""
        stream = self.parts(number, engine)
        await anext(stream)
        await stream.aclose()

    def waits_for(self) -> list[str | None]:
        """Of each engine."""
        return [engine.waits_for for engine in self._llm.client.status().engines]

    @property
    def engine_pids(self) -> list[int | None]:
        return self._llm.client.engine_pids

    def generated(self, engine: int) -> int:
        """Tokens that an engine reports."""
        assert self._llm.metrics is not None
        return self._llm.metrics.engines[engine].stats.num_generated_tokens


async def scenario(together: Together) -> None:
    # One engine works, and the other has experts for it.
    await together.check(0, engine=0)
    assert together.generated(0) >= LENGTHS[0]
    assert together.generated(1) == 0
    await together.check(1, engine=1)
    # Both work, at prompts of other lengths, and for other numbers of steps. Some of it is not wanted any more.
    await asyncio.gather(
        *(together.check(number, engine=number % 2) for number in range(4)), together.abort(0, engine=1),
        together.check(2, engine=1),
    )  # fmt: skip
    # One engine's worker dies, and the other engine cannot go on either.
    before = together.engine_pids
    await asyncio.gather(
        together.check(0, engine=0),
        together.check(2, engine=1, on_half=lambda: os.kill(worker_of(0).pid, signal.SIGKILL)),
    )
    assert not set(before) & set(together.engine_pids)


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> list[list[int]]:
    """The tokens that one engine gives each prompt."""
    with LLM(str(checkpoint("qwen3_moe")), **OPTIONS) as one:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = one.generate(prompts, [sampling(number) for number in range(4)], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@asynccontextmanager
async def together(folder: Path, expected: list[list[int]], **options: Any) -> AsyncIterator[Together]:
    llm = AsyncLLM.from_engine_args(
        model=str(folder), **OPTIONS, data_parallel_size=2, enable_expert_parallel=True, **options
    )
    try:
        yield Together(llm, expected)
    finally:
        await llm.aclose()


def test_tokens_are_those_of_one_engine_whatever_the_other_does(
    checkpoint: Callable[..., Path], expected: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with together(checkpoint("qwen3_moe"), expected, enable_eplb=True, eplb_config=EPLB) as engines:
            await scenario(engines)

    asyncio.run(run())
    log = capfd.readouterr().err
    assert re.search(r"worker-tp0 +rebalanced experts in [\d.]+ s, [1-9]", log)
    assert re.search(r"worker-tp0 +balancedness of experts: 0\.\d+ over 2 layers", log)
    assert "Traceback" not in log


def test_stages_of_several_engines_share_the_experts_of_their_layers(
    checkpoint: Callable[..., Path], expected: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"pipeline_parallel_size": 2, "enable_eplb": True, "eplb_config": EPLB}

    async def run() -> None:
        async with together(checkpoint("qwen3_moe"), expected, **options) as engines:
            await scenario(engines)

    asyncio.run(run())
    log = capfd.readouterr().err
    assert re.search(r"worker-tp0 +rebalanced experts in [\d.]+ s, [1-9]", log)  # over the engines: each has one rank
    assert "Traceback" not in log


@pytest.mark.parametrize("num_local", [1, 0])
def test_streams_of_all_hosts_wait_for_a_lost_one(
    checkpoint: Callable[..., Path],
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_local: int,
) -> None:
    """Engine 1 is on another host, which is not there at first, and is lost later. Engine 0 is on the server's host,
    or also on another one."""
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    folder, port = checkpoint("qwen3_moe"), free_port()
    nodes: list[Popen[bytes]] = []

    def start(engine: int = 1) -> None:
        flags = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--master-addr", "127.0.0.1"]
        flags += ["--master-port", str(port), "--data-parallel-start-rank", str(engine)]
        env = TOKEN | {"QUIRE_HOST_IP": f"127.0.0.{2 + engine}"}
        nodes.append(start_node(folder, tmp_path / "log", *flags, env=env))

    def lose() -> None:
        nodes[-1].kill()
        nodes[-1].wait()

    async def start_when_missed(engines: Together) -> None:
        while engines.waits_for() != ["the host of engine 1"] * 2:
            await asyncio.sleep(0.02)
        start()

    async def run() -> None:
        where = {"data_parallel_size_local": num_local, "master_addr": "127.0.0.1", "master_port": port}
        async with together(folder, expected, **where) as engines:
            await asyncio.gather(start_when_missed(engines), engines.check(3, engine=0))
            await asyncio.gather(
                engines.check(0, engine=0), engines.check(2, engine=1, on_half=lose), start_when_missed(engines)
            )
            await engines.check(1, engine=1)

    try:
        if not num_local:
            start(engine=0)
        asyncio.run(asyncio.wait_for(run(), 240))
        nodes[-1].terminate()
        assert nodes[-1].wait(30) == 0
    finally:
        for node in nodes:
            node.kill()
            node.wait()

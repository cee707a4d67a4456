"""Two pipeline stages in processes of their own: whatever a request asks for, and what happens when one dies."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.core.wire.structured_outputs import StructuredOutputsParams
from tests.checkpoints import VOCAB_SIZE
from tests.servers import ServerProcess

pytestmark = pytest.mark.turns(4, among="whole systems")

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": 256}


def prompt_of(number: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(number * 31 + 17 * i * i + i) % (VOCAB_SIZE - 3) + 3 for i in range(length)]}


PROMPTS = [prompt_of(number, length) for number, length in enumerate((5, 40, 75, 17, 9, 33, 12))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, n=3),
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(
        temperature=1.0, seed=7, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="(yes|no), [0-9]{3}")
    ),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=0.8, seed=2, max_tokens=12, min_tokens=6, bad_words=["a"], logit_bias={11: 3.0}),
    SamplingParams(
        temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, extra_args={"forced_token_id": 9}, min_p=0.02
    ),
]


def answers(llm: LLM) -> list[Any]:
    """All that clients are told, but probabilities, whose last bits may differ."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (
            [(each.text, each.token_ids, each.finish_reason) for each in output.outputs],
            [[list(place) for place in each.logprobs or ()] for each in output.outputs],
            [place and list(place) for place in output.prompt_logprobs or ()],
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint("llama"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("pipeline")
    process = ServerProcess(folder, model, "--served-model-name", "tiny", "-pp", "2").wait_until_ready()
    yield process
    process.stop()


def test_every_kind_of_request_has_the_answer_of_one_stage(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    options = OPTIONS | {"logits_processors": ["tests.executor.processors:Forced"]}
    with LLM(model, **options) as one:
        expected = answers(one)
    with LLM(model, **options, pipeline_parallel_size=2, max_num_batched_tokens=32) as two:
        assert two.get_world_size() == 2
        assert answers(two) == expected
        assert answers(two) == expected, "with prompts in the prefix cache"


def workers_of(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    workers = [each for each in children if "quire.executor.processes.worker_process" in " ".join(each.cmdline())]
    return sorted(workers, key=lambda each: each.pid)


def running(server: ServerProcess) -> float:
    lines = httpx.get(server.base_url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running{"))


@pytest.mark.parametrize(
    ("stage", "number"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)], ids=lambda value: str(value)
)
def test_streams_go_on_when_a_stage_is_killed_or_stopped(
    server: ServerProcess, stage: int, number: signal.Signals
) -> None:
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_tokens": 200, "temperature": 0.9, "seed": 4}
    asked |= {"model": "tiny", "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked).choices[0].text
    text, victim = "", None
    for chunk in client.completions.create(stream=True, **asked):
        text += chunk.choices[0].text
        if victim is None and len(text) > 20:
            victim = workers_of(server)[stage]
            logged = len(server.logs())
            victim.send_signal(number)
    assert victim is not None
    assert text == whole
    assert victim.pid not in {each.pid for each in workers_of(server)}
    if number is signal.SIGSTOP:  # the other stage says where it is
        told = server.logs()[logged:]
        assert f"Stopped by a signal (SIGSTOP): Worker {('tp0', 'pp1-tp0')[stage]}" in told
        assert "most recent call first" in told


def test_a_client_that_leaves_frees_its_request(server: ServerProcess) -> None:
    async def leave() -> None:
        client = openai.AsyncOpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)
        stream = await client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(60):
            while running(server):
                await asyncio.sleep(0.05)
        answer = await client.completions.create(model="tiny", prompt=[5, 6], max_tokens=3)
        assert answer.choices[0].finish_reason is not None

    asyncio.run(leave())

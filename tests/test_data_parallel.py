"""A server with two engines: both work, metrics and health tell them apart, and no stream notices a dead one."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from quire import LLM, SamplingParams
from tests.servers import ServerProcess

pytestmark = pytest.mark.turns(4, among="whole systems")

NUM_STREAMS = 4
NUM_TOKENS = 600


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "tiny", "--data-parallel-size", "2", "--num-gpu-blocks-override", "512")
    process = ServerProcess(tmp_path_factory.mktemp("dp"), str(checkpoint("llama")), *options).wait_until_ready()
    yield process
    process.stop()


def engines_of(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "quire.frontend.launch.engine_main" in " ".join(child.cmdline())]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def health(server: ServerProcess) -> dict[str, Any]:
    answer = httpx.get(server.base_url + "/health")
    assert answer.status_code == 200
    body: dict[str, Any] = answer.json()
    return body


def metric(server: ServerProcess, name: str) -> dict[str, float]:
    """The values of a metric by engine."""
    text = httpx.get(server.base_url + "/metrics").text
    found = re.findall(rf'^{name}{{[^}}]*engine="(\d+)"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def complete(server: ServerProcess, number: int, on_text: Callable[[], object] = lambda: None) -> str:
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=120)
    stream = client.completions.create(
        model="tiny", prompt=[5, 6, number + 7], max_tokens=NUM_TOKENS, temperature=0.9, seed=number, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text = ""
    for chunk in stream:
        text += chunk.choices[0].text
        if len(text) > 20:
            on_text()
    return text


def test_streams_have_the_same_tokens_whichever_engine_is_killed(server: ServerProcess) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        whole = list(pool.map(lambda number: complete(server, number), range(NUM_STREAMS)))
        assert all(metric(server, "vllm:generation_tokens_total")[engine] > 0 for engine in "01")
        for victim in (0, 1):
            begun = threading.Barrier(NUM_STREAMS + 1, timeout=60)

            def run(number: int, begun: threading.Barrier = begun) -> str:
                waits = iter([begun.wait])
                return complete(server, number, lambda: next(waits, lambda: None)())

            answers = pool.map(run, range(NUM_STREAMS))
            begun.wait()
            os.kill(engines_of(server)[victim].pid, signal.SIGKILL)
            assert list(answers) == whole
            wait_for(lambda: [each["state"] for each in health(server)["engines"]] == ["serving", "serving"])


def test_health_and_metrics_tell_the_engines_apart(server: ServerProcess) -> None:
    assert metric(server, "vllm:num_requests_running").keys() == {"0", "1"}
    assert "engine-dp1" in server.logs()
    pid = engines_of(server)[0].pid
    os.kill(pid, signal.SIGKILL)
    seen: list[dict[str, Any]] = []
    wait_for(lambda: bool(seen.append(health(server))) or "reason" in seen[-1]["engine"])
    assert seen[-1]["engine"]["state"] == "serving"
    assert " is restarting" in seen[-1]["engine"]["reason"]
    wait_for(lambda: "reason" not in health(server)["engine"])


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "use_beam_search": True, "n": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "use_beam_search": True, "n": 2}),
        ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]]}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/v1/messages", {**CHAT, "model": "tiny"}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}),
    ],
)
def test_a_header_chooses_the_engine(server: ServerProcess, route: str, body: dict[str, Any]) -> None:
    def ask(rank: str) -> httpx.Response:
        headers = {"X-data-parallel-rank": rank}
        return httpx.post(server.base_url + route, json=body, headers=headers, timeout=60)

    def counts() -> dict[str, float]:
        return metric(server, "vllm:prompt_tokens_total")

    for rank, other in ("01", "10"):
        before = counts()
        assert ask(rank).status_code == 200
        after = counts()
        assert after[rank] > before[rank]
        assert after[other] == before[other]
    for rank in ("2", "-1", "one"):
        refused = ask(rank)
        assert refused.status_code == 400
        assert "X-data-parallel-rank" in refused.json()["error"]["message"]


def test_python_programs_have_several_engines_too(checkpoint: Callable[..., Path]) -> None:
    prompts = [{"prompt_token_ids": [5, 6, number]} for number in range(7, 13)]
    params = SamplingParams(max_tokens=8, temperature=0)
    texts = []
    for size in (1, 2):
        llm = LLM(
            str(checkpoint("llama")), data_parallel_size=size, num_gpu_blocks_override=128, disable_log_stats=False
        )
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        engines = {each.labels["engine"] for each in llm.get_metrics() if "engine" in each.labels}
        assert len(engines) == size
        llm.shutdown()
    assert texts[0] == texts[1]

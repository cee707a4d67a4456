"""Servers behind a balancer whose engines hold one set of experts; loopback addresses are the hosts."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from tests.hosts import TOKEN
from tests.servers import START_SECONDS, ServerProcess, free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 256}
PROMPTS = [list(range(start, start + size)) for start, size in ((5, 20), (40, 90), (80, 3))]
LENGTHS = [200, 40, 100]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> list[list[int]]:
    """The tokens that one engine gives each prompt."""
    with LLM(str(checkpoint("qwen3_moe")), **OPTIONS) as one:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        sampling = [
            SamplingParams(temperature=0.9, seed=seed, max_tokens=length, ignore_eos=True)
            for seed, length in enumerate(LENGTHS)
        ]
        outputs = one.generate(prompts, sampling, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


class Servers:
    """Two servers, of which any may be missing.

    Args:
        numbers: flags of each.

    Attributes:
        last: the engines of the second one.
    """

    def __init__(self, folder: Path, checkpoint: Path, numbers: list[list[str]], last: str) -> None:
        self.last = last
        self._folder = folder
        self._checkpoint = str(checkpoint)
        self._numbers = numbers
        self._options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        self._options += ["--served-model-name", "tiny", "--enable-expert-parallel", "--data-parallel-address"]
        self._options += ["127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
        self.all: list[ServerProcess] = []
        self.now: dict[int, ServerProcess] = {}

    def start(self, number: int) -> None:
        env = TOKEN | {"QUIRE_HOST_IP": f"127.0.0.{number + 1}"}
        server = ServerProcess(self._folder, self._checkpoint, *self._options, *self._numbers[number], env=env)
        self.all.append(server)
        self.now[number] = server

    def kill(self, number: int) -> None:
        server = self.now.pop(number)
        server.process.kill()
        server.process.wait()

    def wait_until_ready(self) -> None:
        for server in self.now.values():
            server.wait_until_ready()

    def ask(self, server: int, number: int, on_half: Callable[[], None] = lambda: None) -> list[int]:
        """The tokens of one request; `on_half` is called when half of them are there."""
        body: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": LENGTHS[number]}
        body |= {"temperature": 0.9, "seed": number, "ignore_eos": True, "return_token_ids": True, "stream": True}
        token_ids: list[int] = []
        waiting = [on_half]
        with httpx.stream("POST", f"{self.now[server].base_url}/v1/completions", json=body, timeout=240) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    token_ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if waiting and len(token_ids) > LENGTHS[number] // 2:
                    waiting.pop()()
        return token_ids

    def wait_for(self, server: int, missing: str) -> dict[str, Any]:
        """The status of a server's engines once they wait for that, or after as long as a start may take."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                health = httpx.get(self.now[server].base_url + "/health", timeout=30).json()
                engine = (health.get("engines") or [health["engine"]])[0]
                if engine.get("waits_for") == missing or time.monotonic() > deadline:
                    return engine
            time.sleep(0.02)


EXTERNAL = [
    ["--data-parallel-size", "2", "--data-parallel-rank", "0"],
    ["--data-parallel-size", "2", "--data-parallel-rank", "1", "--api-server-count", "2"],
]
HYBRID = [
    ["--nnodes", "2", "--node-rank", rank, "--data-parallel-size", "4", "--data-parallel-hybrid-lb"] for rank in "01"
]


@pytest.fixture(params=[(EXTERNAL, "1"), (HYBRID, "2, 3")], ids=["external", "hybrid"])
def servers(request: Any, checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, checkpoint("qwen3_moe"), *request.param)
    try:
        yield made
    finally:
        for server in made.all:
            server.stop()


@pytest.mark.timeout(300)
def test_streams_of_both_servers_wait_for_the_one_that_is_lost(servers: Servers, expected: list[list[int]]) -> None:
    first, last = "the server of engine 0", f"the server of engine {servers.last}"

    def check(server: int, on_half: Callable[[], None] = lambda: None) -> None:
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(servers.ask, server, number, on_half if not number else lambda: None) for number in range(3)
            ]
            assert [each.result() for each in asked] == expected

    servers.start(1)
    assert servers.wait_for(1, first)["state"] == "starting"
    servers.start(0)
    servers.wait_until_ready()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(check, (0, 1))) == [None, None]

    def lose(server: int, missing: str) -> None:
        servers.kill(server)
        assert servers.wait_for(1 - server, missing)["state"] == "restarting"
        servers.start(server)

    for lost, missing in ((1, last), (0, first)):
        check(1 - lost, on_half=partial(lose, lost, missing))
        servers.wait_until_ready()
        check(lost)

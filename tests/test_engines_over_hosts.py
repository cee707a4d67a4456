"""Two engines of two workers each, all on different hosts, behind one server; loopback addresses are the hosts."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest

from tests.hosts import TOKEN, start_node
from tests.servers import START_SECONDS, ServerProcess, free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

WHERE = ["--nnodes", "4", "--data-parallel-size", "2", "--tensor-parallel-size", "2", "--master-port"]
OPTIONS = ["--num-gpu-blocks-override", "600", "--served-model-name", "tiny", "--max-num-seqs", "8"]


class Cluster:
    """Node 0, and nodes 1 to 3."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._where = [*WHERE, str(free_port())]
        self.nodes: dict[int, Popen[bytes]] = {}
        for number in (3, 1, 2):
            self.start(number)
        self.server = ServerProcess(folder, str(checkpoint), *OPTIONS, *self._where, env=TOKEN)

    def start(self, number: int) -> None:
        env = TOKEN | {"QUIRE_HOST_IP": f"127.0.0.{number + 1}"}
        log, rank = self._folder / f"node-{number}.log", ["--node-rank", str(number)]
        self.nodes[number] = start_node(self._checkpoint, log, *self._where, *rank, env=env)

    def wait_for(self, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The status of engine 1 once that is reached, or after as long as a start may take."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            engine = httpx.get(self.server.base_url + "/health", timeout=30).json()["engines"][1]
            if is_reached(engine) or time.monotonic() > deadline:
                return engine
            time.sleep(0.05)

    def close(self) -> None:
        try:
            self.server.stop()
        finally:
            for node in self.nodes.values():
                node.terminate()
            assert [node.wait(30) for node in self.nodes.values()] == [0] * 3


@pytest.fixture
def cluster(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, checkpoint("llama"))
    try:
        made.server.wait_until_ready()
        yield made
    finally:
        made.close()


def answer(server: ServerProcess, seed: int, engine: int | None) -> str:
    body = {"model": "tiny", "prompt": [seed + 5, 6, 7], "max_tokens": 80, "temperature": 0.9, "seed": seed}
    headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
    got = httpx.post(
        f"{server.base_url}/v1/completions", json=body | {"ignore_eos": True}, headers=headers, timeout=240
    )
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]["text"]


@pytest.mark.timeout(300)
def test_tokens_are_those_of_one_host_also_when_one_is_lost(cluster: Cluster, server: ServerProcess) -> None:
    expected = [answer(server, seed, None) for seed in range(2)]
    with ThreadPoolExecutor(5) as pool:

        def ask() -> list[str]:
            asked = [pool.submit(answer, cluster.server, seed, engine) for engine in range(2) for seed in range(2)]
            return [each.result() for each in asked]

        assert ask() == expected * 2
        waiting = pool.submit(ask)
        cluster.nodes[3].kill()
        cluster.nodes[3].wait()
        missing = cluster.wait_for(lambda engine: engine.get("waits_for") == "node 3 of 4")
        assert (missing["state"], missing["waits_for"]) == ("restarting", "node 3 of 4")
        cluster.start(3)
        assert waiting.result() == expected * 2
    assert cluster.wait_for(lambda engine: engine["state"] == "serving")["state"] == "serving"
    assert answer(cluster.server, 1, 1) == expected[1]

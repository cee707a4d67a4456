"""Whole engines on two hosts behind one server; loopback addresses are the hosts."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import environ
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.servers import ServerProcess, free_port

SECRET = {"QUIRE_JOIN_TOKEN": "of-the-tests-" + "x" * 32, "OMP_NUM_THREADS": "1", "QUIRE_HOST_IP": "127.0.0.2"}


class Hosts:
    """Node 0 with engine 0, and at another address a node with engine 1."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._where = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
        self._where += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
        options = ["--num-gpu-blocks-override", "600", "--served-model-name", "tiny", "--max-num-seqs", "8"]
        self.server = ServerProcess(folder, str(checkpoint), *options, *self._where, env=SECRET)
        self.node = self.start_node()

    def start_node(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "quire", "serve", str(self._checkpoint), "--headless", *self._where]
        with (self._folder / "node.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--data-parallel-start-rank", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ | SECRET,
            )

    def close(self) -> None:
        try:
            self.server.stop()
        finally:
            self.node.terminate()
            assert self.node.wait(30) == 0

    def wait_for_state_of_1(self, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What /health says of engine 1, once that is reached, or after a minute."""
        deadline = time.monotonic() + 60
        while True:
            engine = httpx.get(self.server.base_url + "/health", timeout=30).json()["engines"][1]
            if is_reached(engine) or time.monotonic() > deadline:
                return engine
            time.sleep(0.05)

    def running(self) -> dict[str, int]:
        """Running requests by engine."""
        rows = httpx.get(self.server.base_url + "/metrics", timeout=30).text.splitlines()
        counts = [row for row in rows if row.startswith("vllm:num_requests_running{")]
        return {row.split('engine="')[1].split('"')[0]: int(float(row.rsplit(" ", 1)[1])) for row in counts}


@pytest.fixture(scope="module")
def hosts(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"), checkpoint("llama"))
    try:
        made.server.wait_until_ready()
        yield made
    finally:
        made.close()


def answers(server: ServerProcess, num_tokens: int) -> list[str]:
    """Of several requests at a time, which an idle server with two engines divides."""
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=120)

    def answer(seed: int) -> str:
        options: dict[str, Any] = {"temperature": 0.9, "seed": seed, "extra_body": {"ignore_eos": True}}
        chosen = client.completions.create(model="tiny", prompt=[seed + 5, 6, 7], max_tokens=num_tokens, **options)
        return chosen.choices[0].text

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(answer, range(6)))


def test_streams_of_a_lost_host_go_on_at_the_other_and_it_may_come_back(hosts: Hosts, server: ServerProcess) -> None:
    expected = answers(server, 1000)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, hosts.server, 1000)
        deadline = time.monotonic() + 60
        while not all(hosts.running().get(engine) for engine in "01") and time.monotonic() < deadline:
            if asked.done():  # before both engines were seen at work
                asked = pool.submit(answers, hosts.server, 1000)
            time.sleep(0.02)
        children = psutil.Process(hosts.node.pid).children(recursive=True)
        hosts.node.kill()
        hosts.node.wait()
        assert asked.result() == expected
    _, alive = psutil.wait_procs(children, 30)
    assert not alive
    assert httpx.get(hosts.server.base_url + "/health", timeout=30).status_code == 200
    missing = hosts.wait_for_state_of_1(lambda engine: "waits_for" in engine)
    assert (missing["state"], missing["waits_for"]) == ("restarting", "the host of engine 1")
    hosts.node = hosts.start_node()
    back = hosts.wait_for_state_of_1(lambda engine: engine["state"] == "serving")
    assert "waits_for" not in back
    assert answers(hosts.server, 30) == answers(server, 30)

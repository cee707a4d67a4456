"""Whole engines on two hosts behind one server of two processes; loopback addresses are the hosts."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.hosts import OWN_PROCESSES, TOKEN, Hosts, start_node
from tests.servers import ServerProcess, free_port

pytestmark = pytest.mark.turns(4, among="whole systems")


@pytest.fixture(scope="module")
def hosts(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Node 0 with engine 0, and a node with engine 1."""
    where = ["--data-parallel-size", "2", "--nnodes", "2"]
    where += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    options = ["--num-gpu-blocks-override", "600", "--served-model-name", "tiny", "--max-num-seqs", "8"]
    options += ["--api-server-count", "2"]
    folder, number = tmp_path_factory.mktemp("hosts"), ["--node-rank", "1", "--max-num-seqs", "9"]
    made = Hosts(folder, checkpoint("llama"), where, number, options)
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
        while not all(hosts.metrics("vllm:num_requests_running").values()) and time.monotonic() < deadline:
            if asked.done():  # before both engines were seen at work
                asked = pool.submit(answers, hosts.server, 1000)
            time.sleep(0.02)
        children = psutil.Process(hosts.node.pid).children(recursive=True)
        hosts.node.kill()
        hosts.node.wait()
        assert asked.result() == expected
    _, alive = psutil.wait_procs(children, 30)
    assert not alive
    missing = hosts.wait_for_health(lambda health: "waits_for" in health["engines"][1])
    assert missing["engine"]["state"] == "serving"
    assert "what this node ignores on its own command line: --max-num-seqs" in hosts.node_log()
    engine = missing["engines"][1]
    assert (engine["state"], engine["waits_for"]) == ("restarting", "the host of engine 1")
    assert "he node with engine 1" in engine["reason"] or "connection to the engine was lost" in engine["reason"]
    assert (hosts.metrics("quire:engine_up"), hosts.metrics("quire:engine_waits_for")) == ({"0": 1, "1": 0}, {"1": 1})
    hosts.node = hosts.start_node()
    back = hosts.wait_for_health(lambda health: health["engines"][1]["state"] == "serving")
    assert "waits_for" not in back["engines"][1]
    assert answers(hosts.server, 30) == answers(server, 30)
    assert (hosts.metrics("quire:engine_up"), hosts.metrics("quire:engine_waits_for")) == ({"0": 1, "1": 1}, {})


def can_have_own_processes() -> bool:
    try:
        return subprocess.run([*OWN_PROCESSES, "true"], capture_output=True, timeout=60, check=False).returncode == 0
    except FileNotFoundError:  # there is no unshare
        return False


@pytest.mark.skipif(not can_have_own_processes(), reason="it needs root, and namespaces of processes")
def test_a_grammar_holds_where_the_servers_files_cannot_be_opened(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The vocabulary of a grammar is a file of the server's process."""
    folder, where = checkpoint("llama"), ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    where += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    node = start_node(folder, tmp_path / "log", *where, "--data-parallel-start-rank", "1", within=OWN_PROCESSES)
    server = ServerProcess(
        tmp_path, str(folder), "--served-model-name", "tiny", "--num-gpu-blocks-override", "64", *where, env=TOKEN
    )
    try:
        server.wait_until_ready()
        client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=120)
        for form in ("[a-c]{8}", "[d-f]{8}"):  # the vocabulary is sent once
            texts = [
                client.completions.create(
                    model="tiny", prompt=[5, 6, 7], max_tokens=20, temperature=0,
                    extra_headers={"X-data-parallel-rank": str(engine)},
                    extra_body={"structured_outputs": {"regex": form}},
                ).choices[0].text
                for engine in range(2)
            ]  # fmt: skip
            assert re.fullmatch(form, texts[0])
            assert texts[1] == texts[0]
        assert "failed" not in server.logs()
    finally:
        server.stop()
        node.kill()
        node.wait()

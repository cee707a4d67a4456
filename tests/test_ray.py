"""A model or its engines on hosts of Ray's: the tokens of one host, also when a host is taken away while it works."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.servers import ServerProcess, free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

LONG: dict[str, Any] = {
    "model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 300, "temperature": 0.9, "seed": 4,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip
HOST = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    head = {**HOST, "num_cpus": 0, "include_dashboard": False}  # takes no node of the model, so that others may go
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    made.hosts = [made.add_node(**HOST) for _ in range(2)]
    yield made
    made.shutdown()


def host_of_a_node(cluster: Any, program: str) -> Any:
    """A host whose raylet started the actor of a node; `program` is the end of the name of the node's module."""
    for host in cluster.hosts:
        [raylet] = host.all_processes["raylet"]
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            if any(word.endswith(program) for word in process.cmdline()):
                return host
    raise AssertionError("no host runs a node")


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.timeout(300)
def test_a_stream_survives_the_loss_of_a_host(
    cluster: Any, checkpoint: Callable[..., Path], server: ServerProcess, tmp_path: Path
) -> None:
    expected = client_of(server).completions.create(**LONG).choices[0].text
    spread = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--served-model-name", "tiny", "--tensor-parallel-size", "2",
        "--num-gpu-blocks-override", "256", "--distributed-executor-backend", "ray", "--nnodes", "2",
        "--master-port", str(free_port()),
        env={"RAY_ADDRESS": cluster.address, "QUIRE_JOIN_TOKEN": "of-the-tests-" + "x" * 32},
    )  # fmt: skip
    try:
        spread.wait_until_ready()
        stream = client_of(spread).completions.create(**LONG, stream=True)
        text = next(stream).choices[0].text
        cluster.remove_node(host_of_a_node(cluster, "node_process"), allow_graceful=False)
        cluster.add_node(**HOST)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == expected
        assert "node 1 has ended" in spread.logs()
    finally:
        spread.stop()


@pytest.mark.timeout(300)
def test_streams_go_on_at_other_engines(
    cluster: Any, checkpoint: Callable[..., Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Three engines on three hosts, one of which is lost with streams on all, and comes back."""
    cluster.hosts.append(cluster.add_node(**HOST))
    expected = answers(server)
    engines = ServerProcess(
        tmp_path, str(checkpoint("llama")), "--served-model-name", "tiny", "--num-gpu-blocks-override", "600",
        "--data-parallel-size", "3", "--data-parallel-size-local", "1", "--data-parallel-backend", "ray",
        "--data-parallel-rpc-port", str(free_port()),
        env={"RAY_ADDRESS": cluster.address, "QUIRE_JOIN_TOKEN": "of-the-tests-" + "x" * 32},
    )  # fmt: skip
    try:
        engines.wait_until_ready()
        wait_until_all_serve(engines)
        with ThreadPoolExecutor(1) as pool:

            def keep_asking(asked: Future[list[str]], until: Callable[[], bool]) -> Future[list[str]]:
                while not until():
                    if asked.done():
                        assert asked.result() == expected
                        asked = pool.submit(answers, engines)
                    time.sleep(0.02)
                return asked

            asked = keep_asking(pool.submit(answers, engines), lambda: all_run(engines))
            cluster.remove_node(host_of_a_node(cluster, "ray_actor"), allow_graceful=False)
            asked = keep_asking(asked, lambda: states(engines) != ["serving"] * 3)
            assert asked.result() == expected
        cluster.add_node(**HOST)
        wait_until_all_serve(engines)
    finally:
        engines.stop()


def answers(server: ServerProcess) -> list[str]:
    """Of nine requests at a time, which three idle engines divide."""
    client = client_of(server)
    options = [{**LONG, "prompt": [seed + 5, 6, 7], "max_tokens": 1000, "seed": seed} for seed in range(9)]
    with ThreadPoolExecutor(9) as pool:
        return [each.choices[0].text for each in pool.map(lambda own: client.completions.create(**own), options)]


def all_run(server: ServerProcess) -> bool:
    """Whether every engine has requests."""
    lines = httpx.get(server.base_url + "/metrics").text.splitlines()
    running = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")]
    return len(running) == 3 and all(running)


def states(server: ServerProcess) -> list[str]:
    health = httpx.get(server.base_url + "/health").json()
    return [engine["state"] for engine in health["engines"]]


def wait_until_all_serve(server: ServerProcess) -> None:
    deadline = time.monotonic() + 90
    while states(server) != ["serving"] * 3:
        assert time.monotonic() < deadline, server.logs()
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--distributed-executor-backend", "needs --nnodes"),
        ("--data-parallel-backend", "needs --data-parallel-size-local"),
    ],
)
def test_without_other_nodes_ray_is_refused(
    option: str, message: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    command = ServerProcess(tmp_path, str(checkpoint("llama")), option, "ray")
    assert command.process.wait(60) == 1
    assert message in command.logs()

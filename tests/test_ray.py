"""A model on two hosts of Ray's: the tokens of one host, also when a host is taken away and another one comes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.servers import ServerProcess, free_port

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


def host_of_the_agent(cluster: Any) -> Any:
    """The host whose raylet started the actor that runs the agent of node 1."""
    for host in cluster.hosts:
        [raylet] = host.all_processes["raylet"]
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            if any(word.endswith("node_process") for word in process.cmdline()):
                return host
    raise AssertionError("no host runs an agent")


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
        cluster.remove_node(host_of_the_agent(cluster), allow_graceful=False)
        cluster.add_node(**HOST)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == expected
        assert "node 1 has ended" in spread.logs()
    finally:
        spread.stop()


def test_without_other_nodes_ray_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    command = ServerProcess(tmp_path, str(checkpoint("llama")), "--distributed-executor-backend", "ray")
    assert command.process.wait(60) == 1
    assert "needs --nnodes" in command.logs()

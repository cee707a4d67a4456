"""A model on two hosts, as users start it: `quire serve` and `quire serve --headless`, at two loopback addresses."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.hosts import Hosts
from tests.servers import ServerProcess, free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 300, "temperature": 0.9, "seed": 4, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def hosts(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    options = ["--tensor-parallel-size", "2", "--num-gpu-blocks-override", "256", "--served-model-name", "tiny"]
    folder, number = tmp_path_factory.mktemp("hosts"), ["--node-rank", "1"]
    made = Hosts(folder, checkpoint("llama"), where, number, options, node_first=True)
    try:
        made.server.wait_until_ready()
        yield made
    finally:
        made.close()


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_answers_are_those_of_one_host_with_and_without_a_grammar(hosts: Hosts, server: ServerProcess) -> None:
    one, two = client_of(server), client_of(hosts.server)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for more in ({}, {"extra_body": {"response_format": form}}):
        options: dict[str, Any] = {"model": "tiny", "prompt": "Hello there", "max_tokens": 40, "temperature": 0, **more}
        texts = [each.completions.create(**options).choices[0].text for each in (one, two)]
        assert texts[0] == texts[1] != ""


def test_everything_listens_at_one_address_and_survives_rubbish(hosts: Hosts) -> None:
    """Whatever listens: HTTP, node 0 for nodes, the place where ranks meet, and the ranks for each other."""
    client = client_of(hosts.server)
    options: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
    before = client.completions.create(**options).choices[0].text
    roots = [psutil.Process(each.pid) for each in (hosts.server.process, hosts.node)]
    places = {
        each.laddr
        for root in roots
        for process in (root, *root.children(recursive=True))
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert {place.ip for place in places} <= {"127.0.0.1", "127.0.0.2"}
    assert len(places) >= 5  # two for HTTP and nodes, one for meeting, and one of each rank
    for place in places:
        for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), os.urandom(4096), os.urandom(1 << 20)):
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=2) as scanner:
                scanner.sendall(rubbish)
    assert client.completions.create(**options).choices[0].text == before
    assert "waits_for" not in hosts.health()["engine"]
    assert [root.is_running() for root in roots] == [True, True]


def test_a_stream_survives_the_death_of_the_other_host(hosts: Hosts) -> None:
    client = client_of(hosts.server)
    whole = client.completions.create(model="tiny", **LONG).choices[0].text
    text, missed = "", None
    with ThreadPoolExecutor() as pool:
        for chunk in client.completions.create(model="tiny", stream=True, **LONG):
            text += chunk.choices[0].text
            if missed is None and len(text) > 20:
                hosts.node.kill()
                hosts.node.wait()
                missed = pool.submit(_restart_node_when_it_is_missed, hosts)
    assert missed is not None
    assert text == whole
    state = missed.result()
    assert (state["state"], state["waits_for"]) == ("restarting", "node 1 of 2")
    assert "ode 1" in state["reason"] or "Worker tp" in state["reason"]
    assert "waits_for" not in hosts.health()["engine"]


def _restart_node_when_it_is_missed(hosts: Hosts) -> dict[str, Any]:
    """What /health said of the engine meanwhile."""
    missing = hosts.wait_for_health(lambda health: health["engine"].get("waits_for") == "node 1 of 2")
    hosts.node = hosts.start_node()
    return missing["engine"]


def test_nodes_that_cannot_join_end_with_a_sentence(hosts: Hosts) -> None:
    attempts = {
        ("--node-rank", "0"): "--headless is for nodes 1 and up",
        ("--node-rank", "2"): "--node-rank 2 is not below --nnodes 2",
        ("--node-rank", "1"): "There is already node 1",
    }
    processes = [hosts.start_node(*arguments) for arguments in attempts]
    processes.append(hosts.start_node(env={"QUIRE_JOIN_TOKEN": "short"}))
    assert [process.wait(60) for process in processes] == [1] * 4
    assert "ERROR   node-1  Node 0 refuses this node: There is already node 1" in hosts.node_log()
    for sentence in (*attempts.values(), "QUIRE_JOIN_TOKEN has 5 characters and needs 32 or more"):
        assert sentence in hosts.node_log()
    assert "There is already node 1" in hosts.server.logs()
    assert hosts.node.poll() is None


def test_a_node_ends_when_told_to(hosts: Hosts) -> None:
    """The server then waits for it, and says so although nobody has asked for anything."""
    hosts.node.send_signal(signal.SIGINT)
    assert hosts.node.wait(30) == 0
    state = hosts.wait_for_health(lambda health: health["engine"].get("waits_for") == "node 1 of 2")["engine"]
    assert (state["state"], state["waits_for"]) == ("restarting", "node 1 of 2")
    assert "is lost: it was told to stop" in state["reason"]


def test_a_node_that_becomes_the_agent_ends_when_told_to(hosts: Hosts) -> None:
    node = hosts.start_node()
    while b"node_process" not in Path(f"/proc/{node.pid}/cmdline").read_bytes():
        time.sleep(0.005)
    node.terminate()
    assert node.wait(30) == 0

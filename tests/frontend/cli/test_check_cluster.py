"""`quire check-cluster` at loopback addresses, which are the hosts."""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from os import environ
from pathlib import Path

import pytest

from tests.servers import free_port

pytestmark = pytest.mark.turns(4, among="whole systems")

DEMO_MODEL = Path(__file__).parents[3] / "quire" / "demo_model"
SECRET = "of-the-tests-" + "x" * 32


class Check:
    """Processes of one check; node n is at 127.0.0.(n + 1)."""

    def __init__(self, num_nodes: int, *arguments: str, num_ports: int = 1) -> None:
        self.port = neighbouring_ports(num_ports)
        self._arguments = ["--nnodes", str(num_nodes), "--master-addr", "127.0.0.1", *arguments]
        self._arguments += ["--master-port", str(self.port)]

    def node(self, rank: int, *arguments: str, secret: str = SECRET) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "quire", "check-cluster", "--node-rank", str(rank), *self._arguments, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"QUIRE_JOIN_TOKEN": secret, "QUIRE_HOST_IP": f"127.0.0.{rank + 1}"},
        )


def neighbouring_ports(count: int) -> int:
    """The first of so many free ports."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def test_nodes_that_can_serve_together(checkpoint: Callable[..., Path]) -> None:
    check = Check(3, str(checkpoint("llama")))
    nodes = [check.node(rank) for rank in (2, 1, 0)]  # node 0 is not the first
    *others, (table, errors) = [node.communicate(timeout=60) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], errors
    assert [out for out, _ in others] == ["These nodes can serve together.\n"] * 2
    nodes_table, latencies, bandwidths, end = table.split("\n\n")
    assert end == others[0][0]
    assert [row.split()[0] for row in nodes_table.splitlines()] == ["node", "0", "1", "2"]
    assert all(f"127.0.0.{rank + 1} " in row for rank, row in enumerate(nodes_table.splitlines()[1:]))
    for matrix in (latencies, bandwidths):
        cells = [row.split()[1:] for row in matrix.splitlines()[2:]]
        assert all((cells[i][j] == "-") == (i == j) for i in range(3) for j in range(3))
        assert all(float(cells[i][j]) > 0 for i in range(3) for j in range(3) if i != j)


def test_what_keeps_nodes_from_serving(checkpoint: Callable[..., Path]) -> None:
    """Node 1 has another checkpoint, node 2 another token, and somebody gives himself node 4's number."""
    check = Check(4)
    one = check.node(1, str(checkpoint("llama", tie=True)))
    stranger, rank_4 = check.node(2, secret="another" + SECRET), check.node(4)
    for node in (one, stranger):
        assert node.stderr is not None
        assert "waiting for node 0" in node.stderr.readline()
    head = check.node(0, str(checkpoint("llama")), "--timeout", "5")
    (found, log), (of_one, _), (_, of_stranger), (_, of_4) = [
        node.communicate(timeout=60) for node in (head, one, stranger, rank_4)
    ]
    assert [node.returncode for node in (head, one, stranger, rank_4)] == [1] * 4, log
    assert "Its checkpoint has other settings or weights than node 0's" in found
    assert "node 2, 3 of 4 did not come to 127.0.0.1:" in found
    assert "set the same QUIRE_JOIN_TOKEN on all nodes" in found
    assert of_one.splitlines() == [line for line in found.splitlines() if line.startswith("Problem: ")]
    assert "does not know this node's join token" in of_stranger
    assert "--node-rank 4 is not below --nnodes 4" in of_4


def test_nodes_join_where_they_would_to_serve() -> None:
    """Of two engines with two hosts each, the second one's have a port of their own. Flags are those of serving."""
    check = Check(4, "-dp", "2", "-tp", "2", "--port", "8000", num_ports=2)
    head = check.node(0)
    assert head.stderr is not None
    said = [head.stderr.readline() for _ in range(2)]
    assert f"waiting at 127.0.0.1:{check.port} for node 1 of 4" in said[0]
    assert f"waiting at 127.0.0.1:{check.port + 1} for node 2, 3 of 4" in said[1]
    others = [check.node(rank, "--headless") for rank in (1, 2, 3)]
    for node in (*others, head):
        out, errors = node.communicate(timeout=60)
        assert out.endswith("These nodes can serve together.\n"), errors


def test_a_port_of_an_engine_that_is_taken_is_named() -> None:
    check = Check(4, "-dp", "2", "-tp", "2", num_ports=2)
    with socket.create_server(("127.0.0.1", check.port + 1)):
        _, errors = check.node(0).communicate(timeout=60)
    assert f"Nodes cannot join at 127.0.0.1:{check.port + 1}: " in errors


def test_a_model_that_does_not_fit_is_told_of_each_node_that_is_too_small() -> None:
    def found(*arguments: str) -> list[str]:
        check = Check(2, str(DEMO_MODEL), "-tp", "2", *arguments)
        nodes = [check.node(rank) for rank in (1, 0)]
        return [node.communicate(timeout=90)[0] for node in nodes][1].split("\n\n")[-1].splitlines()

    assert found() == ["These nodes can serve together."]
    huge = json.dumps({"intermediate_size": 2**26})
    of_0, of_1 = found("--load-format", "dummy", "--hf-overrides", huge)
    assert re.match(r"Problem: Node 0 \(.*\): .*bytes are missing", of_0)
    assert re.match(r"Problem: Node 1 \(.*\): .*bytes are missing", of_1)

"""Which hosts a check finds in the options, and which of a host's devices a worker has."""

from typing import Any

import pytest

from quire.core.cluster.check_messages import GPUMemory, NodeReport
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.config.engine_args import EngineArgs
from quire.core.config.parallel import ParallelConfig
from quire.core.errors import ConfigError
from quire.frontend.launch.cluster_check import MemoryCheck, Place, places, with_nodes
from tests.executor.paged_driver import Checkpoints


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ({"nnodes": 3, "node_rank": 2}, (3, 2)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, (2, 0)),
        ({"data_parallel_size": 6, "data_parallel_size_local": 2, "data_parallel_start_rank": 4}, (3, 2)),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, (4, 3)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 3}, "leave open which host this is"),
        ({"data_parallel_size": 4}, "--nnodes must say the number of hosts"),
        ({}, "--nnodes must say the number of hosts"),
    ],
)
def test_the_hosts(options: dict[str, Any], hosts: tuple[int, int] | str) -> None:
    if isinstance(hosts, str):
        with pytest.raises(ConfigError, match=hosts):
            with_nodes(ParallelConfig(**options))
        return
    found = with_nodes(ParallelConfig(**options))
    assert (found.nnodes, found.node_rank) == hosts


def test_places_of_workers() -> None:
    """By worker, one of each engine: one engine on two hosts, two on two, four on two, two on four."""
    assert places(ParallelConfig(nnodes=2), 4) == [
        [Place(0, 0, 2)],
        [Place(0, 1, 2)],
        [Place(1, 0, 2)],
        [Place(1, 1, 2)],
    ]
    two = ParallelConfig(nnodes=2, data_parallel_size=2)
    assert places(two, 2) == [[Place(0, 0, 2), Place(1, 0, 2)], [Place(0, 1, 2), Place(1, 1, 2)]]
    four = ParallelConfig(nnodes=2, data_parallel_size=4)
    assert places(four, 1) == [[Place(0, 0, 2), Place(0, 1, 2), Place(1, 0, 2), Place(1, 1, 2)]]
    spread = ParallelConfig(nnodes=4, data_parallel_size=2)
    assert places(spread, 2) == [[Place(0, 0, 1), Place(2, 0, 1)], [Place(1, 0, 1), Place(3, 0, 1)]]


def report(rank: int, ram_bytes: int, gpus: list[GPUMemory]) -> NodeReport:
    facts = NodeFacts("workers", [rank], 2, f"10.0.0.{rank}", f"host-{rank}", "1", {"torch": "2"}, "")
    return NodeReport(facts, "", ram_bytes, gpus)


def test_a_host_has_memory_for_each_of_its_workers(checkpoint: Checkpoints) -> None:
    options = {"model": str(checkpoint("llama")), "tensor_parallel_size": 2, "nnodes": 2, "device": "cpu"}
    args = EngineArgs.from_flat(**options, kv_cache_memory_bytes=1 << 20, dtype="float32")
    check = MemoryCheck.of(args, with_nodes(args.parallel))
    assert check is not None
    [problem] = check.misfits({0: report(0, 1 << 40, []), 1: report(1, 1 << 19, [])})
    assert problem.startswith("Node 1 (host-1): ")
    assert "bytes are missing" in problem


def test_nothing_is_compared_without_a_model_or_where_it_is_not_divided(checkpoint: Checkpoints) -> None:
    for options in ({"tensor_parallel_size": 2}, {"model": str(checkpoint("llama"))}):
        args = EngineArgs.from_flat(**options, nnodes=2)
        assert MemoryCheck.of(args, args.parallel) is None

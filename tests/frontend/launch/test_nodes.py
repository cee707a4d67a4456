"""What hosts are told of each other at their start."""

from pathlib import Path

import pytest

from quire.core.config.parallel import ParallelConfig
from quire.core.logging import LoggingConfig
from quire.frontend.launch.nodes import engines_node_start, node_start


def test_a_node_keeps_the_name_of_node_0_which_may_come_back_at_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_JOIN_TOKEN", "t" * 32)
    workers = ParallelConfig(nnodes=2, node_rank=1, master_addr="localhost", headless=True)
    assert node_start(workers, tmp_path, LoggingConfig()).head == "localhost:29501"
    engines = ParallelConfig(
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_start_rank=1,
        data_parallel_address="localhost",
        data_parallel_rpc_port=7,
        headless=True,
    )
    assert engines_node_start(engines, tmp_path, LoggingConfig()).head == "localhost:7"

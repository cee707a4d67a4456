"""What hosts are told of each other at their start."""

from pathlib import Path

import pytest

from quire.core.config.parallel import ParallelConfig
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig
from quire.frontend.launch.nodes import (
    check_start,
    coordinator_starts,
    engines_coordinator_start,
    engines_node_start,
    node_start,
)


@pytest.mark.parametrize("head", ["0.0.0.0", "10.0.0.300", "fe80::1", "a..b", ""])
def test_what_can_be_no_host_is_refused_at_once(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_JOIN_TOKEN", "t" * 32)
    workers = ParallelConfig(nnodes=2, node_rank=1, master_addr=head, headless=True)
    with pytest.raises(ConfigError, match=r"--master-addr .*name .* all nodes reach"):
        node_start(workers, tmp_path, LoggingConfig())


def test_a_node_starts_before_the_name_of_node_0_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_JOIN_TOKEN", "t" * 32)
    monkeypatch.delenv("QUIRE_HOST_IP", raising=False)
    workers = ParallelConfig(nnodes=2, node_rank=1, master_addr="node-0.invalid", headless=True)
    start = node_start(workers, tmp_path, LoggingConfig())
    assert (start.head, start.facts.address) == ("node-0.invalid:29501", "")
    assert check_start(workers, None, "", 0, []).head == "node-0.invalid:29501"
    monkeypatch.setenv("QUIRE_HOST_IP", "127.0.0.2")
    assert node_start(workers, tmp_path, LoggingConfig()).facts.address == "127.0.0.2"
    monkeypatch.setenv("QUIRE_HOST_IP", "192.0.2.1")  # perhaps its interface is not up yet
    assert node_start(workers, tmp_path, LoggingConfig()).facts.address == "192.0.2.1"
    monkeypatch.setenv("QUIRE_HOST_IP", "0.0.0.0")
    with pytest.raises(ConfigError, match=r"QUIRE_HOST_IP 0\.0\.0\.0 stands for all interfaces"):
        node_start(workers, tmp_path, LoggingConfig())


def test_node_0_is_told_at_once_that_its_address_is_another_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_JOIN_TOKEN", "t" * 32)
    with pytest.raises(
        ConfigError, match=r"--master-addr 192\.0\.2\.1 is no address of this host, which has .*127\.0\.0\.1"
    ):
        coordinator_starts(ParallelConfig(nnodes=2, master_addr="192.0.2.1"), tmp_path)
    engines = ParallelConfig(data_parallel_size=2, data_parallel_size_local=1, data_parallel_address="192.0.2.1")
    with pytest.raises(ConfigError, match=r"--data-parallel-address 192\.0\.2\.1 is no address of this host"):
        engines_coordinator_start(engines, tmp_path)


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

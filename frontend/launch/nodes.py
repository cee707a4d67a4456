"""Several hosts: checks their options, and builds the start messages of node 0 and the other nodes."""

import json
from pathlib import Path

from msgspec import to_builtins

from quire.core import envs
from quire.core.cluster.addresses import check_host, interface_of, named_host, own_addresses, resolve
from quire.core.cluster.check_messages import CheckStart, GPUMemory, NodeReport
from quire.core.cluster.engine_hosts import EngineHosts
from quire.core.cluster.join_token import JoinToken
from quire.core.cluster.messages import CoordinatorStart, NodeStart
from quire.core.cluster.node_compatibility import NodeFacts
from quire.core.config.engine_args import EngineArgs
from quire.core.config.parallel import ParallelConfig
from quire.core.config.quantization import short_name
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig, get_logger
from quire.frontend.launch.layout import engine_places, hosts_of_engine
from quire.frontend.launch.peer_servers import CoordinatorServer, ParticipantServer
from quire.frontend.launch.shared_experts import EpochCoordinator, Epochs

logger = get_logger(__name__)


def coordinator_starts(parallel: ParallelConfig, folder: Path) -> list[CoordinatorStart | None]:
    """The start message of each engine on node 0; None if all its workers are on this host.

    Each engine has a port for its other nodes, counted from --master-port.

    Args:
        folder: of the checkpoint.

    Raises:
        ConfigError: the options contradict each other, or this host does not have node 0's address.
    """
    if parallel.headless:
        raise ConfigError("--headless is for `quire serve` on a node without HTTP; leave it out here.")
    _check_rank(parallel)
    if parallel.nnodes == 1:
        return [None for _ in engine_places(parallel)]
    if parallel.node_rank:
        raise ConfigError(f"--node-rank {parallel.node_rank} needs --headless: node 0 alone serves.")
    address = _address_of_coordinator(parallel.master_addr, "--master-addr")
    facts = NodeFacts.of_this_host("workers", [0], parallel.nnodes, address, folder)
    keys, hosts = _token(parallel, parallel.master_port).keys(), hosts_of_engine(parallel)
    others = range(1, parallel.nnodes)
    return [
        CoordinatorStart(
            f"{address}:{_port(parallel, data)}", keys, facts, [rank for rank in others if rank // hosts != data]
        )
        for data in range(parallel.data_parallel_size)
    ]


def _port(parallel: ParallelConfig, data: int) -> int:
    """The port at which the nodes with workers of an engine join."""
    port = parallel.master_port + data
    if port > 65535:
        raise ConfigError(f"--master-port {parallel.master_port}: each engine has a port from there on; lower it.")
    return port


def engines_coordinator_start(parallel: ParallelConfig, folder: Path) -> CoordinatorStart:
    """The start message of a server whose other engines run on other hosts. Raises ConfigError as `coordinator_starts`
    does."""
    head, flag, port = _engines_coordinator(parallel)
    address = _address_of_coordinator(head, flag)
    ranks = [place.data for place in engine_places(parallel)]
    facts = NodeFacts.of_this_host("engines", ranks, parallel.data_parallel_size, address, folder)
    return CoordinatorStart(f"{address}:{port}", _token(parallel, port).keys(), facts)


def engines_node_start(parallel: ParallelConfig, folder: Path, logging: LoggingConfig) -> NodeStart:
    """The start message of a headless node with whole engines. Raises ConfigError as `node_start` does."""
    if parallel.data_parallel_start_rank is None or parallel.data_parallel_size_local is None:
        raise ConfigError(
            "--headless with --data-parallel-size needs --nnodes and --node-rank, or --data-parallel-start-rank "
            "and --data-parallel-size-local: which engines this host runs."
        )
    head, flag, port = _engines_coordinator(parallel)
    address, ranks = _address_of_node(head, flag), [place.data for place in engine_places(parallel)]
    facts = NodeFacts.of_this_host("engines", ranks, parallel.data_parallel_size, address, folder)
    return NodeStart(f"{head}:{port}", _token_of_all().keys(), facts, str(folder), logging)


def shared_epochs(args: EngineArgs, config: EngineConfig, folder: Path, nodes: EngineHosts | None) -> Epochs | None:
    """The epochs of the engines that this server runs; None if they share no experts.

    Args:
        nodes: other hosts with engines of this server; None: there are none.

    Raises:
        ConfigError: as `coordinator_starts`, where other servers have some of the engines.
    """
    if not config.layout.shares_experts:
        return None
    if len(config.served_engines) == config.layout.data:
        return EpochCoordinator(nodes)
    head, flag, port = _engines_coordinator(args.parallel)
    is_first = 0 in config.served_engines
    address = _address_of_coordinator(head, flag) if is_first else _address_of_node(head, flag)
    facts = NodeFacts.of_this_host(
        "servers", list(config.served_engines), config.layout.data, address, folder, _shared_settings(args, config)
    )
    if is_first:
        return CoordinatorServer(CoordinatorStart(f"{address}:{port}", _token(args.parallel, port).keys(), facts))
    return ParticipantServer(f"{head}:{port}", _token_of_all().keys(), facts)


def _shared_settings(args: EngineArgs, config: EngineConfig) -> dict[str, str]:
    """The settings, by flag, on which servers must agree if their engines share experts."""
    experts, eplb = config.expert_placement, config.eplb
    assert experts is not None  # they share some
    return {
        "--tensor-parallel-size": str(config.layout.tensor),
        "--decode-context-parallel-size": str(config.layout.context),
        "--pipeline-parallel-size": str(config.layout.pipeline),
        "QUIRE_PP_LAYER_PARTITION": ",".join(map(str, config.layers_by_stage)),
        "--max-num-batched-tokens": str(config.limits.max_num_batched_tokens),
        "--dtype": config.spec.dtype,
        "--quantization": short_name(config.quantization) or "none",
        "--device": config.device,
        "--model-impl": config.spec.implementation,
        "--hf-overrides": json.dumps(args.model.hf_overrides, sort_keys=True),
        "--expert-placement-strategy": experts.strategy,
        "--eplb-config": "without --enable-eplb" if eplb is None else json.dumps(to_builtins(eplb), sort_keys=True),
    }


def _engines_coordinator(parallel: ParallelConfig) -> tuple[str, str, int]:
    """Node 0's name or address, the option that names it, and the port at which nodes with engines join."""
    head, flag = parallel.data_parallel_address, "--data-parallel-address"
    if head is None:
        head, flag = parallel.master_addr, "--master-addr"
    return head, flag, parallel.data_parallel_rpc_port or parallel.master_port


def _address_of_coordinator(host: str, flag: str) -> str:
    """Node 0's address, which is this host's."""
    address = resolve(host, flag)
    try:
        interface_of(address)
    except ConfigError:
        name = host if host == address else f"{host} ({address})"
        raise ConfigError(
            f"{flag} {name} is no address of this host, which has {own_addresses()}; name the one at which other nodes "
            "reach it, or, if node 0 is another host, give this one a number (--node-rank, --data-parallel-start-rank)."
        ) from None
    return address


def _address_of_node(head: str, flag: str) -> str:
    """The address or name of this host, which is not node 0; empty: see `Participant`. Neither this host's interface
    nor node 0's name need exist yet."""
    check_host(head, flag)
    return named_host()


def node_start(parallel: ParallelConfig, folder: Path, logging: LoggingConfig) -> NodeStart:
    """The start message of a headless node's process.

    Raises:
        ConfigError: the options contradict each other, or there is no join token.
    """
    if parallel.nnodes == 1:
        raise ConfigError("--headless needs --nnodes with the number of hosts, 2 or more, and this host's --node-rank.")
    _check_rank(parallel)
    if not parallel.node_rank:
        raise ConfigError("--headless is for nodes 1 and up: give --node-rank, or leave --headless out on node 0.")
    engine_places(parallel)  # refuses options that contradict each other, as on node 0
    address = _address_of_node(parallel.master_addr, "--master-addr")
    facts = NodeFacts.of_this_host("workers", [parallel.node_rank], parallel.nnodes, address, folder)
    port = _port(parallel, parallel.node_rank // hosts_of_engine(parallel))
    return NodeStart(f"{parallel.master_addr}:{port}", _token_of_all().keys(), facts, str(folder), logging)


def check_start(
    parallel: ParallelConfig, folder: Path | None, devices: str, ram_bytes: int, gpus: list[GPUMemory]
) -> CheckStart:
    """The start message of this host, node 0 or another, for a check before serving.

    Args:
        parallel: with the number of hosts.
        folder: of the checkpoint; None: none is checked.
        devices, ram_bytes, gpus: as in `NodeReport`.

    Raises:
        ConfigError: options contradict each other, an address is wrong, or there is no join token.
    """
    _check_rank(parallel)
    engines, hosts = parallel.data_parallel_size, parallel.nnodes
    if engines > 1 and parallel.data_parallel_size_local != 0 and engines % hosts and hosts % engines:
        raise ConfigError(
            f"--nnodes {hosts} does not divide the {engines} engines of --data-parallel-size evenly: make one of the "
            "two a multiple of the other."
        )
    if engines == 1 or hosts_of_engine(parallel) > 1:
        head, flag, port = parallel.master_addr, "--master-addr", parallel.master_port
        ports = [_port(parallel, data) for data in range(engines)]
    else:
        head, flag, port = _engines_coordinator(parallel)
        ports = [port]
    if parallel.node_rank:
        address = _address_of_node(head, flag)
    else:
        head = address = _address_of_coordinator(head, flag)
    heads = [f"{head}:{each}" for each in ports]
    token = _token_of_all() if parallel.node_rank else _token(parallel, port)
    facts = NodeFacts.of_this_host("workers", [parallel.node_rank], parallel.nnodes, address, folder)
    return CheckStart(heads, token.keys(), NodeReport(facts, devices, ram_bytes, gpus))


def join_secret(parallel: ParallelConfig) -> str:
    """The join token of this cluster, for the program that starts its other nodes."""
    return _token(parallel, parallel.master_port).secret


def engines_join_secret(parallel: ParallelConfig) -> str:
    """Like `join_secret`, where the other nodes have whole engines."""
    return _token(parallel, _engines_coordinator(parallel)[2]).secret


def _check_rank(parallel: ParallelConfig) -> None:
    if parallel.node_rank >= parallel.nnodes:
        raise ConfigError(
            f"--node-rank {parallel.node_rank} is not below --nnodes {parallel.nnodes}; nodes are numbered from 0."
        )


def _token_of_all() -> JoinToken:
    """The token that the user has given to this node."""
    token = JoinToken.from_environment()
    if token is None:
        raise ConfigError("A node needs the join token: set QUIRE_JOIN_TOKEN to what node 0 has or names in its log.")
    return token


def _token(parallel: ParallelConfig, port: int) -> JoinToken:
    """The user's token, else the one in a file that node 0 keeps for its next start."""
    if (token := JoinToken.from_environment()) is not None:
        return token
    path = envs.cache_folder() / f"join-token-{port}"
    token = JoinToken.from_file(path)
    # Ray brings it to the other nodes.
    if "ray" not in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
        logger.info("the other nodes need the join token in %s, as QUIRE_JOIN_TOKEN", path)
    return token

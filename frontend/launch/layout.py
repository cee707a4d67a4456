"""Derives from the options how a model is divided: the layout of an engine's workers, and the engines of each host."""

from msgspec.structs import replace

from quire.core.config.engine_args import EngineArgs
from quire.core.config.parallel import EplbConfig, ExpertPlacement, ParallelConfig
from quire.core.errors import ConfigError
from quire.core.wire.rank import EnginePlace, Layout


def divide_engines(asked: ParallelConfig) -> ParallelConfig:
    """Translates the options of a host that names its engines by `--nnodes` into options for engines on several hosts.

    Each host has the same number of engines, in the order of the nodes' ranks, as in vLLM; or each engine has the same
    number of hosts. Other options stay as they are.

    Raises:
        ConfigError: the options contradict each other.
    """
    _check_server(asked)
    nodes, engines, number = asked.nnodes, asked.data_parallel_size, asked.node_rank
    alone = asked.data_parallel_external_lb or asked.data_parallel_rank is not None
    if number and nodes > 1 and not (asked.headless or alone or asked.data_parallel_hybrid_lb):
        raise ConfigError(f"--node-rank {number} needs --headless: node 0 alone serves.")
    if nodes == 1 or engines == 1:
        return asked
    if engines % nodes and nodes % engines:
        raise ConfigError(
            f"--nnodes {nodes} does not divide the {engines} engines of --data-parallel-size evenly: make one of the "
            "two a multiple of the other."
        )
    if number >= nodes:
        raise ConfigError(f"--node-rank {number} is not below --nnodes {nodes}; nodes are numbered from 0.")
    if hosts_of_engine(asked) > 1:
        _check_spread(asked)
        return asked
    local = engines // nodes
    start = number * local
    if asked.data_parallel_size_local not in (None, local) or asked.data_parallel_start_rank not in (None, start):
        raise ConfigError(
            f"--nnodes {nodes} and --node-rank {number} give this host engines {start} to {start + local - 1}: leave "
            "out --data-parallel-size-local and --data-parallel-start-rank, or --nnodes."
        )
    if alone and (local > 1 or asked.data_parallel_rank not in (None, number)):
        raise ConfigError(
            f"--data-parallel-external-lb has one engine on each host, numbered as the host: give --nnodes {engines} "
            f"and as --node-rank the engine's number, or leave out --nnodes."
        )
    if asked.headless and not number:
        raise ConfigError("--headless is for nodes 1 and up: give --node-rank, or leave --headless out on node 0.")
    backend = "ray" if asked.distributed_executor_backend == "ray" else asked.data_parallel_backend
    return replace(
        asked,
        nnodes=1,
        node_rank=0,
        data_parallel_size_local=None if alone else local,
        data_parallel_start_rank=None if alone else start,
        data_parallel_rank=number if alone else None,
        data_parallel_backend=backend,
    )


def hosts_of_engine(parallel: ParallelConfig) -> int:
    """The number of hosts over which the workers of each engine are spread."""
    return max(1, parallel.nnodes // parallel.data_parallel_size)


def _check_spread(asked: ParallelConfig) -> None:
    """Refuses options that engines spread over several hosts do not have."""
    given = {
        "--data-parallel-size-local": asked.data_parallel_size_local is not None,
        "--data-parallel-start-rank": asked.data_parallel_start_rank is not None,
        "--data-parallel-rank": asked.data_parallel_rank is not None,
        "--data-parallel-hybrid-lb": asked.data_parallel_hybrid_lb,
        "--data-parallel-external-lb": asked.data_parallel_external_lb,
        "--distributed-executor-backend ray": asked.distributed_executor_backend == "ray",
        "--data-parallel-backend ray": asked.data_parallel_backend == "ray",
    }
    if flags := [flag for flag, is_given in given.items() if is_given]:
        raise ConfigError(
            f"--nnodes {asked.nnodes} spreads each of the {asked.data_parallel_size} engines over "
            f"{hosts_of_engine(asked)} hosts, and node 0 serves all: leave out {flags[0]}, or lower --nnodes."
        )


def _check_server(asked: ParallelConfig) -> None:
    """Refuses a node without a server among hosts that each have one."""
    flags = {
        "--data-parallel-hybrid-lb": asked.data_parallel_hybrid_lb,
        "--data-parallel-external-lb": asked.data_parallel_external_lb,
        "--data-parallel-rank": asked.data_parallel_rank is not None,
    }
    if asked.headless and (given := [flag for flag, is_given in flags.items() if is_given]):
        raise ConfigError(
            f"{given[0]} gives each host a server of its own, and --headless is for hosts whose engines node 0 serves: "
            "leave out one of the two."
        )


def layout_of(asked: ParallelConfig) -> Layout:
    """The number of parts into which the options divide the model.

    Raises:
        ConfigError: they contradict each other.
    """
    tensor, context = asked.tensor_parallel_size, asked.decode_context_parallel_size
    layout = Layout(
        data=asked.data_parallel_size,
        pipeline=asked.pipeline_parallel_size,
        prefill=asked.prefill_context_parallel_size,
        tensor=tensor,
        context=context,
        expert=tensor * asked.data_parallel_size if asked.enable_expert_parallel else 1,
        nodes=hosts_of_engine(asked),
    )
    if layout.num_workers % layout.nodes:
        raise ConfigError(
            f"--nnodes {layout.nodes} does not divide the {layout.num_workers} workers of the model evenly; raise "
            "--tensor-parallel-size or --pipeline-parallel-size, or lower --nnodes."
        )
    if tensor % context:
        raise ConfigError(
            f"--decode-context-parallel-size {context} must divide --tensor-parallel-size {tensor}: it divides "
            "the cache of workers that hold the same KV heads."
        )
    return layout


def check_heads(world_size: int, num_heads: int) -> None:
    """Refuses what every layer would refuse, before the processes are started.

    A model without attention counts as one head; its layers know what they can be divided into.
    """
    if num_heads > 1 and num_heads % world_size:
        divisors = [str(size) for size in range(1, num_heads + 1) if num_heads % size == 0]
        raise ConfigError(
            f"--tensor-parallel-size {world_size} does not divide the model's {num_heads} attention heads; "
            f"choose one of {', '.join(divisors)}."
        )


def check_sharing(args: EngineArgs) -> None:
    """Refuses options that engines with one shared set of experts do not have."""
    asked, sharing = args.parallel, "--enable-expert-parallel divides the experts over all engines"
    if asked.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"{sharing}, whose workers have a step's tokens whole then: use --tensor-parallel-size instead of "
            "--prefill-context-parallel-size, or drop --data-parallel-size."
        )
    if hosts_of_engine(asked) > 1 and asked.data_parallel_size > 1:
        raise ConfigError(
            f"{sharing}, each of which is on one host then: lower --nnodes to {asked.data_parallel_size}, or drop "
            "--enable-expert-parallel."
        )
    if args.load.load_format == "sharded_state":
        raise ConfigError(
            f"{sharing}, and files of --load-format sharded_state are for one engine: serve the checkpoint itself."
        )


def expert_placement(asked: ParallelConfig) -> ExpertPlacement | None:
    """The initial placement of whole experts; None if experts are cut.

    Raises:
        ConfigError: options that need whole experts, or several workers.
    """
    if not asked.enable_expert_parallel:
        if asked.enable_eplb:
            raise ConfigError("--enable-eplb places whole experts: give --enable-expert-parallel, too.")
        return None
    num_redundant = (asked.eplb_config or EplbConfig()).num_redundant_experts
    if num_redundant and not asked.enable_eplb:
        raise ConfigError("--eplb-config.num_redundant_experts has no effect without --enable-eplb: give it, too.")
    if asked.enable_eplb and asked.expert_placement_strategy != "linear":
        raise ConfigError("--enable-eplb places experts by their load; drop --expert-placement-strategy.")
    if asked.enable_eplb and asked.tensor_parallel_size * asked.data_parallel_size == 1:
        raise ConfigError(
            "--enable-eplb has nothing to balance on one worker: raise --tensor-parallel-size or --data-parallel-size."
        )
    return ExpertPlacement(strategy=asked.expert_placement_strategy, num_redundant=num_redundant)


def engine_places(parallel: ParallelConfig) -> list[EnginePlace]:
    """The engines that this command runs on this host.

    Raises:
        ConfigError: the options contradict each other.
    """
    size, rank = parallel.data_parallel_size, parallel.data_parallel_rank
    if size > 1 and hosts_of_engine(parallel) > 1:  # they and their first workers' host are known to node 0 alone
        return [EnginePlace(data) for data in range(size)]
    local, start = parallel.data_parallel_size_local, parallel.data_parallel_start_rank
    if parallel.data_parallel_external_lb and rank is None:
        raise ConfigError("--data-parallel-external-lb: --data-parallel-rank must say which of the engines this is.")
    if rank is not None:
        if parallel.data_parallel_hybrid_lb or local not in (None, 1) or start not in (None, rank):
            raise ConfigError(
                "--data-parallel-rank runs that engine alone; leave out --data-parallel-hybrid-lb, "
                "--data-parallel-size-local and --data-parallel-start-rank."
            )
        if rank >= size:
            raise ConfigError(f"--data-parallel-rank {rank} must be below --data-parallel-size {size}.")
        return [EnginePlace(rank)]
    if parallel.data_parallel_hybrid_lb and not local:
        raise ConfigError("--data-parallel-hybrid-lb: --data-parallel-size-local must say how many engines run here.")
    if local == 0 and (size == 1 or parallel.headless):
        raise ConfigError("--data-parallel-size-local 0 is for node 0 of several engines, where other hosts run them.")
    first, number = start or 0, size if local is None else local
    if first + number > size:
        raise ConfigError(
            f"--data-parallel-start-rank {first} and {number} engines from there on exceed --data-parallel-size {size}."
        )
    return [EnginePlace(first + index, index, number) for index in range(number)]


def remote_places(parallel: ParallelConfig) -> list[EnginePlace]:
    """The engines that this server uses and that other hosts run."""
    if parallel.data_parallel_hybrid_lb or parallel.data_parallel_rank is not None:
        return []
    here = {place.data for place in engine_places(parallel)}
    return [EnginePlace(data) for data in range(parallel.data_parallel_size) if data not in here]


def served_engines(parallel: ParallelConfig) -> tuple[int, ...]:
    """The numbers of all engines that this server uses."""
    return tuple(sorted(place.data for place in [*engine_places(parallel), *remote_places(parallel)]))

"""Options: how one model is spread over workers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.config.types import NotNegative, Positive

ExpertPlacementStrategy = Literal["linear", "round_robin"]
"""The experts of a layer that a rank holds: neighbouring ones, or every n-th."""


class ExpertPlacement(Struct, frozen=True, kw_only=True):
    """The initial placement of whole experts, before any load is known; `num_redundant` of them have a second copy."""

    strategy: ExpertPlacementStrategy = "linear"
    num_redundant: int = 0


class EplbConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for moving experts by their load in tokens.

    Every `step_interval` steps, experts are placed by the tokens of the last `window_size` steps.
    `num_redundant_experts` slots of a layer hold further copies of its busiest experts. `log_balancedness` logs every
    `log_balancedness_interval` steps how evenly the ranks were loaded. The other options are vLLM's, and take the one
    value that applies here. Ranks stop while the experts of a layer move, which is `use_async=false`. `use_async=true`
    is accepted because it is vLLM's default; the placements are the same.
    """

    window_size: Positive = 1000
    step_interval: Positive = 3000
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0
    log_balancedness: bool = False
    log_balancedness_interval: Positive = 1
    policy: Literal["default"] = "default"
    communicator: None = None
    use_async: bool = True
    enable_migration_batching: bool = False

    def __post_init__(self) -> None:
        if self.enable_migration_batching:
            raise ValueError("enable_migration_batching cannot be true: the experts of a layer move at once")


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """How one model is spread over workers."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Workers that each hold a shard of every layer.", extra={"aliases": ["-tp"]})
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Stages that each hold some of the layers, as many as possible alike; "
            "QUIRE_PP_LAYER_PARTITION=4,6,6 says how many each holds.",
            extra={"aliases": ["-pp"]},
        ),
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Engines that divide the requests. Each holds the whole model; with --enable-expert-parallel, "
            "all together hold the experts.",
            extra={"aliases": ["-dp"]},
        ),
    ] = 1
    data_parallel_backend: Annotated[
        Literal["mp", "ray"],
        Meta(
            description="Who starts the nodes with the engines that this host does not run: you, or Ray.",
            extra={"aliases": ["-dpb"]},
        ),
    ] = "mp"
    data_parallel_size_local: Annotated[
        NotNegative | None,
        Meta(
            description="How many of these engines this host runs; all when unset. 0: other hosts run them all.",
            extra={"aliases": ["-dpl"]},
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        NotNegative | None,
        Meta(description="Number of this server's first engine among all.", extra={"aliases": ["-dpr"]}),
    ] = None
    data_parallel_address: Annotated[
        str | None,
        Meta(
            description="Node 0's address for nodes with further engines, or for servers whose engines share experts; "
            "--master-addr when unset.",
            extra={"aliases": ["-dpa"]},
        ),
    ] = None
    data_parallel_rpc_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(
            description="Node 0's port at --data-parallel-address; --master-port when unset.",
            extra={"aliases": ["-dpp"]},
        ),
    ] = None
    data_parallel_rank: Annotated[
        NotNegative | None,
        Meta(
            description="Run this one of the engines alone; another program divides the requests between servers.",
            extra={"aliases": ["-dpn"]},
        ),
    ] = None
    data_parallel_hybrid_lb: Annotated[
        bool,
        Meta(
            description="Divide requests between the engines of this server alone; another program divides them "
            "between servers. Needs --data-parallel-size-local.",
            extra={"aliases": ["-dph"]},
        ),
    ] = False
    data_parallel_external_lb: Annotated[
        bool,
        Meta(
            description="Another program divides the requests between servers of one engine each. Implied by "
            "--data-parallel-rank, which it needs.",
            extra={"aliases": ["-dpe"]},
        ),
    ] = False
    decode_context_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            description="So many tensor-parallel workers with the same KV heads divide the positions of each sequence.",
            extra={"aliases": ["-dcp"]},
        ),
    ] = 1
    prefill_context_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Copies of the model's workers that divide the tokens of each step, and the positions of each "
            "sequence.",
            extra={"aliases": ["-pcp"]},
        ),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        Positive | None,
        Meta(
            description="With --decode-context-parallel-size or --prefill-context-parallel-size, so many neighbouring "
            "positions are one worker's; divides --block-size. 1 when unset.",
            extra={"aliases": ["--dcp-kv-cache-interleave-size"]},
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Divide the experts of a mixture over the workers of all engines whole, instead of cutting "
            "each of them.",
            extra={"aliases": ["-ep"]},
        ),
    ] = False
    expert_placement_strategy: Annotated[
        ExpertPlacementStrategy,
        Meta(
            description="With --enable-expert-parallel, a worker holds neighbouring experts (linear), or every n-th of "
            "them (round_robin)."
        ),
    ] = "linear"
    enable_eplb: Annotated[
        bool,
        Meta(
            description="With --enable-expert-parallel, place experts anew while the engine runs, so that busy ones "
            "are on different workers."
        ),
    ] = False
    eplb_config: Annotated[
        EplbConfig | None,
        Meta(
            description="With --enable-eplb: window_size and step_interval (steps), num_redundant_experts, "
            "log_balancedness, log_balancedness_interval.",
            extra={"parse": "json"},
        ),
    ] = None
    distributed_executor_backend: Annotated[
        Literal["uni", "mp", "ray"] | None,
        Meta(
            description="uni runs the worker in the engine process, mp gives each its own; by worker count when unset. "
            "ray is mp, and has Ray start the other nodes of --nnodes.",
        ),
    ] = None
    allow_insecure_serialization: Annotated[
        bool,
        Meta(
            description="Let the program run functions of its own on the workers (LLM.collective_rpc and apply_model). "
            "They are sent as pickles, so whoever reaches the engine could run anything."
        ),
    ] = False
    engine_transport: Annotated[
        Literal["ipc", "tcp"],
        Meta(description="How frontend and engine talk: sockets in a private folder, or encrypted TCP on loopback."),
    ] = "ipc"
    nnodes: Annotated[
        int,
        Meta(
            ge=1,
            description="Hosts over which the workers are spread evenly, or with --data-parallel-size the engines, and "
            "the workers of each where there are more hosts. "
            "Node 0 serves; the others are --headless.",
            extra={"aliases": ["-n"]},
        ),
    ] = 1
    node_rank: Annotated[
        int, Meta(ge=0, description="This host's number among the nodes, from 0.", extra={"aliases": ["-r"]})
    ] = 0
    master_addr: Annotated[
        str,
        Meta(description="Node 0's address for the other nodes. Node 0 listens for them there alone."),
    ] = "127.0.0.1"
    master_port: Annotated[int, Meta(ge=1, le=65535, description="Node 0's port for the other nodes.")] = 29501
    headless: Annotated[
        bool, Meta(description="Serve no HTTP: join node 0, and run the workers that it starts here.")
    ] = False

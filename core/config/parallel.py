"""Options: how one model is spread over workers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

ExpertPlacementStrategy = Literal["linear", "round_robin"]
"""Which experts of a layer a rank holds: a run of neighbours, or every so-many-th one."""


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """How one model is spread over workers."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Workers that each hold a shard of every layer.", extra={"aliases": ["-tp"]})
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="Divide the experts of a mixture over the workers whole, instead of cutting each of them.",
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
    distributed_executor_backend: Annotated[
        Literal["uni", "mp"] | None,
        Meta(
            description="uni runs the worker in the engine process, mp gives each its own; by worker count when unset.",
            extra={"otherwise": "Workers run on one machine, without Ray."},
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

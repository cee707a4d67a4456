"""Options: how one model is spread over workers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """How one model is spread over workers."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Workers that each hold a shard of every layer.", extra={"aliases": ["-tp"]})
    ] = 1
    distributed_executor_backend: Annotated[
        Literal["uni", "mp"] | None,
        Meta(
            description="uni runs the worker in the engine process, mp gives each its own; by worker count when unset."
        ),
    ] = None
    engine_transport: Annotated[
        Literal["ipc", "tcp"],
        Meta(description="How frontend and engine talk: sockets in a private folder, or encrypted TCP on loopback."),
    ] = "ipc"

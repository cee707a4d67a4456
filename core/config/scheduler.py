"""Options: which request runs next, and for how many tokens."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.config.types import Positive


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Options for the order of requests and the size of steps."""

    max_num_batched_tokens: Annotated[
        Positive | None,
        Meta(
            description="Most tokens in one step; by device and entry point when unset.", extra={"parse": "human_int"}
        ),
    ] = None
    max_num_seqs: Annotated[
        Positive | None, Meta(description="Most requests running at once; by device when unset.")
    ] = None
    max_num_queued_reqs: Annotated[
        Positive | None,
        Meta(
            description="Most requests waiting; past it a request is answered 429 with Retry-After. A server that is "
            "not told has a limit by its memory."
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Positive | None,
        Meta(
            description="Most prompt tokens of requests waiting; past it a request is answered 429 with Retry-After. A "
            "server that is not told has a limit by its memory.",
            extra={"parse": "human_int"},
        ),
    ] = None
    max_num_queued_bytes: Annotated[
        Positive | None,
        Meta(
            description="Most bytes of memory that requests waiting hold: prompts, embeddings, grammars; past it a "
            "request is answered 429 with Retry-After. A server that is not told has a sixteenth of its memory.",
            extra={"parse": "human_int"},
        ),
    ] = None
    max_queue_seconds: Annotated[
        int,
        Meta(
            ge=0,
            description="Longest wait in a server's queue, by the rate at which requests finish; a request that would "
            "wait longer is answered 429, unless fewer than 1,024 wait. 0: no limit.",
        ),
    ] = 3600
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Most prompt tokens that one request gets in a step; 0 means no limit.")
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="First come first served, or lowest priority value first.")
    ] = "fcfs"
    priority_aging_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds of waiting that are worth one level of priority, with --scheduling-policy priority; "
            "0: the lowest value always goes first.",
        ),
    ] = 60.0
    long_prefill_slowdown: Annotated[
        float,
        Meta(
            ge=0,
            description="How much longer than without it a step may take that computes a part of a prompt which is too "
            "long for one step, while streams run. 0: no limit.",
        ),
    ] = 2.0
    stream_interval: Annotated[
        int, Meta(ge=1, description="Tokens per event of a stream; its first and its last come at once.")
    ] = 1
    enable_chunked_prefill: Annotated[
        bool | None, Meta(description="Split long prompts over steps; on when unset.")
    ] = None
    async_scheduling: Annotated[
        bool | None, Meta(description="Plan the next step before the last one's tokens are back; on when unset.")
    ] = None

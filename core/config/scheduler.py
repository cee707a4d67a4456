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
        Positive | None, Meta(description="Most requests waiting; past it a request is answered 429 with Retry-After.")
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Most prompt tokens that one request gets in a step; 0 means no limit.")
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="First come first served, or lowest priority value first.")
    ] = "fcfs"
    stream_interval: Annotated[
        int, Meta(ge=1, description="Tokens per event of a stream; its first and its last come at once.")
    ] = 1
    enable_chunked_prefill: Annotated[
        bool | None, Meta(description="Split long prompts over steps; on when unset.")
    ] = None
    async_scheduling: Annotated[
        bool | None, Meta(description="Plan the next step before the last one's tokens are back; on when unset.")
    ] = None

"""Options: memory for the KV cache."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.config.types import Positive


class CacheConfig(Struct, frozen=True, kw_only=True):
    """Memory for the KV cache and what is kept in it."""

    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="Tokens per page; 16 when unset.")
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the device's memory for weights, workspace and KV cache (of free RAM on a CPU).",
            extra={"aliases": ["--device-memory-utilization"]},
        ),
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="KV-cache bytes per worker; wins over --gpu-memory-utilization.", extra={"parse": "human_int"}
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Type of cached keys and values; auto is the model's."),
    ] = "auto"
    num_gpu_blocks_override: Annotated[
        Positive | None, Meta(description="Use exactly this many pages, on any device; for tests of preemption.")
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, Meta(description="Reuse pages of prompts that begin alike; on when unset.")
    ] = None
    prefix_caching_hash_algo: Annotated[
        Literal["sha256"],
        Meta(description="Hash that names a page's content; collision-resistant, so nobody can forge a hit."),
    ] = "sha256"

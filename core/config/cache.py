"""Options: memory for the KV cache."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.config.types import Positive

DEFAULT_MEMORY_SHARE = 0.92


class CacheConfig(Struct, frozen=True, kw_only=True):
    """Memory for the KV cache and what is kept in it."""

    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="Tokens per page; 16 when unset.")
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description="Share of the device's memory for weights, workspace and KV cache; 0.92 when unset. On a CPU a "
            "share of the free RAM; when unset, the KV cache gets 4 GiB, or what one request of full length takes.",
            extra={"aliases": ["--device-memory-utilization"]},
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="KV-cache bytes per worker; wins over --gpu-memory-utilization.", extra={"parse": "human_int"}
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(
            description="Type of cached keys and values; auto is the model's.",
            extra={"otherwise": "Keys and values in 8 bits or less are not there yet."},
        ),
    ] = "auto"
    num_gpu_blocks_override: Annotated[
        Positive | None, Meta(description="Use exactly this many pages, on any device; for tests of preemption.")
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, Meta(description="Reuse pages of prompts that begin alike; on when unset.")
    ] = None
    mamba_block_size: Annotated[
        Positive | None,
        Meta(
            description="Tokens between two copies of a recurrent model's state, from which prompts that begin alike "
            "continue; a multiple of --block-size. When unset, 512 to 2048: so many that a copy takes no more memory "
            "than their keys and values.",
        ),
    ] = None
    prefix_caching_hash_algo: Annotated[
        Literal["sha256"],
        Meta(
            description="Hash that names a page's content; collision-resistant, so nobody can forge a hit.",
            extra={
                "otherwise": "Drop this flag: the hash is of token ids alone, which is reproducible in any process."
            },
        ),
    ] = "sha256"

    @property
    def memory_share(self) -> float:
        """`gpu_memory_utilization`, or its default."""
        return self.gpu_memory_utilization or DEFAULT_MEMORY_SHARE

"""Options: memory for the KV cache."""

import importlib.util
from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.config.types import Positive
from quire.core.errors import ConfigError

DEFAULT_MEMORY_SHARE = 0.92

HashAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
_HASH_PACKAGES: dict[HashAlgorithm, tuple[str, ...]] = {
    "sha256": (),
    "sha256_cbor": ("cbor2",),
    "xxhash": ("xxhash",),
    "xxhash_cbor": ("xxhash", "cbor2"),
}
"""What each algorithm needs beside the standard library."""

KVCacheDtype = Literal[
    "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_per_token_head", "int8",
    "int8_per_token_head", "int4", "int4_per_token_head",
]  # fmt: skip


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
        KVCacheDtype,
        Meta(
            description="Type of cached keys and values; auto is what a quantized checkpoint names, or else the "
            "model's. int8 and fp8 (e4m3 or e5m2) hold twice as many tokens as 16 bits, int4 four times. Scales are "
            "those that the checkpoint has for the type; without them, or with ..._per_token_head, every token and "
            "head has its own.",
            extra={"otherwise": "int4 takes the fewest bytes."},
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        Meta(
            description="Take the scales of cached keys and values from each token and head, not from the checkpoint."
        ),
    ] = False
    kv_cache_dtype_skip_layers: Annotated[
        list[str],
        Meta(
            description="Layers that keep keys and values in the model's own type: numbers among the layers that have "
            "a KV cache, from 0, or sliding_window for all with a window."
        ),
    ] = []
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
        HashAlgorithm,
        Meta(
            description="Hash that names a page's content. sha256 resists collisions, so nobody can forge a hit; "
            "xxhash (128 bits) does not. With _cbor it is of canonical CBOR. All but sha256 need quire[hashes].",
        ),
    ] = "sha256"

    def __post_init__(self) -> None:
        names = _HASH_PACKAGES[self.prefix_caching_hash_algo]
        if missing := [name for name in names if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"--prefix-caching-hash-algo {self.prefix_caching_hash_algo} needs {' and '.join(missing)}, not "
                "installed here: pip install 'quire[hashes]', or choose sha256."
            )

    @property
    def memory_share(self) -> float:
        """`gpu_memory_utilization`, or its default."""
        return self.gpu_memory_utilization or DEFAULT_MEMORY_SHARE

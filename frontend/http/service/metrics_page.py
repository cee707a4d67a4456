"""The text that /metrics answers with, and the facts of the KV cache that it and the log show."""

from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from quire.core.config.resolved import EngineConfig, SchedulerLimits
from quire.core.wire.protocol import EngineReady


class MetricsPage(Protocol):
    """A source of the text."""

    async def text(self) -> bytes:
        """All metrics at this moment, in Prometheus' text format."""


class OwnPage:
    """The metrics of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def text(self) -> bytes:
        return generate_latest(self._registry)


def cache_room(ready: EngineReady, limits: SchedulerLimits) -> tuple[int, float]:
    """The capacity of the KV cache: tokens in requests of full length, and the number of such requests.

    A request takes pages in each KV group, so pages times `block_size` would count its tokens more than once. A request
    to a model without keys and values takes none; the number of slots then limits the requests.
    """
    length, size = ready.max_model_len, ready.block_size
    chunk = limits.largest_chunk
    pages = sum(group.max_pages(length, block_size=size, largest_chunk=chunk) for group in ready.kv_groups)
    num_requests = ready.num_pages / pages if pages else limits.max_num_seqs
    return round(num_requests * length), num_requests


def cache_facts(config: EngineConfig, ready: EngineReady) -> dict[str, str]:
    """Labels of `vllm:cache_config_info`."""
    cache, limits = config.cache, config.limits
    num_tokens, num_requests = cache_room(ready, limits)
    return {
        "block_size": str(ready.block_size),
        "num_gpu_blocks": str(ready.num_pages),
        "num_cpu_blocks": "0",
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": str(ready.caches_prefixes),
        "gpu_memory_utilization": str(cache.memory_share),
        "prefix_caching_hash_algo": cache.prefix_caching_hash_algo,
        "kv_cache_memory_bytes": str(ready.kv_cache_bytes),
        "kv_cache_size_tokens": str(num_tokens),
        "kv_cache_max_concurrency": str(num_requests),
        "num_gpu_blocks_override": str(cache.num_gpu_blocks_override),
    }

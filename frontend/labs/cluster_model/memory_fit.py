"""Computes whether a layout fits the devices' memory, and how many requests its cache holds."""

from msgspec import Struct

from quire.core.config.resolved import EngineConfig
from quire.core.wire.model_cost import ModelCost, ShardCost
from quire.frontend.labs.cluster_model.hardware import Cluster
from quire.frontend.labs.cluster_model.layouts import ClusterLayout
from quire.frontend.labs.cluster_model.load import Load


class MemoryFit(Struct, frozen=True, kw_only=True):
    """Bytes on the fullest device, and the requests of the load that one engine can run at once."""

    weights_bytes: int
    cache_bytes: int
    requests: int
    obstacle: str | None = None


def fit(
    config: EngineConfig, cluster: Cluster, cost: ModelCost, shard: ShardCost, layout: ClusterLayout, load: Load
) -> MemoryFit:
    """The memory of the fuller one of the first and the last stage, and the room that it leaves."""
    layers = -(-cost.num_layers // layout.pipeline) / cost.num_layers
    ends = [shard.embedding_bytes, shard.head.num_bytes]
    end = sum(ends) if layout.pipeline == 1 else max(ends)
    experts = shard.experts.num_bytes * layout.tensor // layout.expert if layout.expert > 1 else shard.experts.num_bytes
    weights = int((shard.layers.num_bytes + shard.rest_bytes + experts) * layers) + end
    usable = int(cluster.device.memory_bytes * config.cache.memory_share)
    room = usable - weights - shard.workspace_bytes
    limits = config.limits
    pages = sum(
        group.max_pages(load.num_tokens, block_size=limits.block_size, largest_chunk=limits.largest_chunk)
        for group in shard.kv_groups
    )
    request = (pages * shard.page_bytes + shard.state_bytes) * layers
    held = int(room // request) if request else limits.max_num_seqs
    obstacle = None
    if held < 1:
        needed = weights + shard.workspace_bytes + int(request)
        obstacle = (
            f"too little memory: weights {gib(weights)}, workspace {gib(shard.workspace_bytes)} and one request "
            f"{gib(int(request))} are {gib(needed - usable)} more than a device's {gib(usable)}"
        )
    return MemoryFit(weights_bytes=weights, cache_bytes=max(0, room), requests=max(0, held), obstacle=obstacle)


def gib(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.1f} GiB"

"""Enumerates the ways to spread a model over all devices of a cluster."""

from collections.abc import Iterator

from msgspec import Struct

from quire.core.wire.model_cost import ModelCost
from quire.frontend.labs.cluster_model.hardware import Cluster


class ClusterLayout(Struct, frozen=True, kw_only=True):
    """How many parts each coordinate divides the devices into.

    Attributes:
        tensor: ranks that divide each layer.
        pipeline: stages that divide the layers.
        data: engines that divide the requests.
        expert: ranks that divide a layer's experts among each other, whole ones; 1: each rank of a stage has a part of
            every expert.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int = 1

    def __str__(self) -> str:
        """For people: `TP 8 × PP 2 × DP 8`, with `× EP 64`."""
        parts = [("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data), ("EP", self.expert)]
        return " × ".join(f"{name} {size}" for name, size in parts if size > 1 or name == "TP")

    @property
    def flags(self) -> list[str]:
        """The flags that ask for it."""
        sizes = [
            ("--tensor-parallel-size", self.tensor),
            ("--pipeline-parallel-size", self.pipeline),
            ("--data-parallel-size", self.data),
        ]
        flags = [word for flag, size in sizes if size > 1 for word in (flag, str(size))]
        return [*flags, "--enable-expert-parallel"] if self.expert > 1 else flags


def tensor_sizes(cluster: Cluster) -> list[int]:
    """Numbers of ranks that may divide a layer: devices of one node, or all devices of some nodes."""
    within = [size for size in _divisors(cluster.num_devices) if size <= cluster.devices_per_node]
    across = [size * cluster.devices_per_node for size in _divisors(cluster.num_nodes) if size > 1]
    return sorted({1, *within, *across[:1]})


def layouts(cluster: Cluster, cost: ModelCost, *, experts_over_engines: bool) -> Iterator[ClusterLayout]:
    """All layouts of the cluster whose tensor-parallel sizes the model can be divided into.

    Within one engine, parts of every expert and whole experts take the same time, so they count as one layout.

    Args:
        experts_over_engines: those too that divide whole experts over several engines, each of which is on one host.
    """
    for shard in cost.shards:
        if cluster.num_devices % shard.tensor:
            continue
        left = cluster.num_devices // shard.tensor
        for stages in _divisors(left):
            if stages > cost.num_layers:
                continue
            layout = ClusterLayout(tensor=shard.tensor, pipeline=stages, data=left // stages)
            yield layout
            group = layout.tensor * layout.data
            on_one_host = layout.tensor * layout.pipeline <= cluster.devices_per_node
            may_share = experts_over_engines and cost.num_experts and layout.data > 1 and on_one_host
            if may_share and cost.num_experts % group == 0:
                yield ClusterLayout(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data, expert=group)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

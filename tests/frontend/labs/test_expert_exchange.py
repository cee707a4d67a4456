"""The plan's expert exchange against the bytes that ranks of several engines really send each other in a layer."""

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any, Literal

import msgspec
import pytest
import torch

from quire.core.config.parallel import ExpertPlacement
from quire.core.wire.model_cost import WeightCost
from quire.core.wire.rank import Layout, Rank
from quire.executor.layers.experts.exchange import ExpertExchange
from quire.executor.layers.experts.places import ExpertPlaces
from quire.executor.parallel.expert_placement import ExpertMap
from quire.executor.parallel.groups import DistributedGroup, GlooGroup, Messages
from quire.executor.parallel.lockstep import Lockstep
from quire.frontend.labs.cluster_model.hardware import Network
from quire.frontend.labs.cluster_model.layouts import ClusterLayout
from quire.frontend.labs.cluster_model.step_time import EXCHANGE, Rows
from tests.executor.thread_group import ThreadGroup
from tests.frontend.labs.test_estimate import DEVICE, cluster, shard, step

EXPERTS, CHOICES = 24, 3
IDS = torch.tensor(list(combinations(range(EXPERTS), CHOICES)))
"""All choices that there are, one of each token: so each expert is chosen equally often."""


KINDS = {"nccl": DistributedGroup, "gloo": GlooGroup}


class CountingGroup(ThreadGroup):
    """Counts the bytes that this rank sends to each other one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent = [0] * self.size

    def begin_exchange(self, sent: Any, received: Any) -> Messages:
        for rank, tensor in sent:
            self.sent[rank] += tensor.nbytes
        return super().begin_exchange(sent, received)


def sent_bytes(layout: Layout, hidden: int, counts_cost: int) -> dict[Rank, list[int]]:
    """What each rank sends to each engine in one layer of experts, where every engine has the tokens of `IDS`."""
    size, num_tokens = layout.data * layout.tensor, len(IDS)
    placement = ExpertMap.initial(EXPERTS, size, ExpertPlacement(), is_balanced=False)
    ranks = [rank for data in range(layout.data) for rank in layout.ranks(data)]
    groups = [CountingGroup.all_of(layout.data) for _ in range(layout.tensor)]

    def run(rank: Rank) -> list[int]:
        group = groups[rank.tensor][rank.data]
        group.counts_cost = counts_cost
        lockstep = Lockstep(torch.distributed, rank, layout, group, (torch.distributed.group.WORLD, None, None))
        lockstep.num_tokens = [num_tokens] * layout.data
        exchange = ExpertExchange(lockstep)
        places = ExpertPlaces(placement, rank.expert, EXPERTS, torch.device("cpu"), num_engines=layout.data)
        x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16)
        tokens = exchange.dispatch(x, IDS, torch.ones(num_tokens, CHOICES), places)
        here = places.local(tokens.x, tokens.ids) >= 0
        sums = exchange.combine(here.sum(dim=1, keepdim=True) * tokens.x, tokens)
        own = places.engines(x, IDS) < layout.data  # each was computed once
        assert torch.equal(sums, own.sum(dim=1, keepdim=True) * x)
        return group.sent

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))


@pytest.mark.parametrize(
    ("engines", "tensor", "nodes", "hidden", "transport", "chooses"),
    [
        (2, 1, 1, 48, "nccl", False),
        (4, 1, 2, 48, "nccl", False),
        (4, 1, 2, 1000, "nccl", True),
        (3, 2, 3, 48, "nccl", False),
        (4, 2, 1, 48, "nccl", False),
        (4, 2, 2, 1000, "nccl", True),
        (4, 1, 2, 48, "gloo", True),
        (4, 2, 1, 48, "gloo", True),
    ],
)
def test_the_plan_counts_what_ranks_send(
    engines: int, tensor: int, nodes: int, hidden: int, transport: Literal["nccl", "gloo"], chooses: bool
) -> None:
    """Also where tokens go only to the engines with experts that they chose."""
    seconds_inside, seconds_across = 1.0, 1000.0  # for each byte
    device = msgspec.structs.replace(
        DEVICE, link_bytes_per_second=1 / seconds_inside, link_seconds=0, transport=transport
    )
    network = Network(bytes_per_second=1 / seconds_across, seconds=0, is_shared=False)
    per_node = engines * tensor // nodes
    where = msgspec.structs.replace(cluster(nodes, per_node), device=device, network=network)
    planned = step(
        ClusterLayout(tensor=tensor, pipeline=1, data=engines, expert=engines * tensor),
        shard(tensor, experts=WeightCost(8, 4)),
        where,
        hidden_size=hidden,
        num_experts=EXPERTS,
        experts_per_token=CHOICES,
        num_expert_layers=1,
    )
    [terms] = planned.stages(Rows(len(IDS)))
    all_bytes = len(IDS) * (2 * 2 * hidden + 12 * CHOICES) * (engines - 1)
    layout, kind = Layout(data=engines, tensor=tensor, expert=engines * tensor), KINDS[transport]
    for rank, sent in sent_bytes(layout, hidden, kind.counts_cost).items():
        assert (sum(sent) < all_bytes) == chooses
        node = rank.data * tensor // per_node
        inside = sum(size for engine, size in enumerate(sent) if engine * tensor // per_node == node)
        across = sum(sent) - inside
        assert terms[EXCHANGE] == pytest.approx(inside * seconds_inside + across * seconds_across)

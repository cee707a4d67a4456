"""Experts that are divided over ranks whole: which of them a rank has, and what it computes of each token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.core.config.parallel import ExpertPlacementStrategy
from quire.core.config.resolved import EngineConfig
from quire.executor.parallel.expert_placement import Placement
from quire.executor.parallel.groups import ParallelGroup

if TYPE_CHECKING:  # it imports the context, of which this is a part
    from quire.executor.layers.experts import Experts


class ExpertParallel:
    """The division of all layers' experts over `size` ranks, of which this is number `rank`.

    Attributes:
        layers: the experts of each layer that was built.
    """

    def __init__(self, rank: int, size: int, strategy: ExpertPlacementStrategy) -> None:
        self._rank = rank
        self._size = size
        self._strategy = strategy
        self.layers: list[Experts] = []

    @classmethod
    def of(cls, config: EngineConfig, group: ParallelGroup) -> "ExpertParallel | None":
        """The division that `config` asks for; None if each rank has a part of each expert."""
        if config.expert_placement is None or group.size == 1:
            return None
        return cls(group.rank, group.size, config.expert_placement)

    def without_layers(self) -> "ExpertParallel":
        """The same division, for a model that is built once more."""
        return ExpertParallel(self._rank, self._size, self._strategy)

    def place(self, num_experts: int, device: torch.device) -> "ExpertPlaces":
        """The places of a layer's experts."""
        return ExpertPlaces(Placement.of(num_experts, self._size, self._strategy), self._rank, device)


class ExpertPlaces:
    """Where the experts of one layer are.

    Attributes:
        own: the numbers of this rank's experts, in the order in which it keeps them.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        self.own = placement.ranks[rank]
        places = torch.full((sum(map(len, placement.ranks)),), -1, dtype=torch.int64)
        places[list(self.own)] = torch.arange(len(self.own))
        self._places = places.to(device)

    def local(self, ids: Tensor) -> Tensor:
        """The places of the experts `ids` [num_tokens, top_k] among this rank's; -1 for those of other ranks."""
        return self._places[ids]

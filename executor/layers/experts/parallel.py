"""The division of whole experts over ranks."""

from typing import Protocol

import torch
from torch import Tensor

from quire.core.config.parallel import ExpertPlacement
from quire.core.config.resolved import EngineConfig
from quire.executor.layers.experts.exchange import ExpertExchange
from quire.executor.layers.experts.places import ExpertPlaces
from quire.executor.parallel.expert_placement import ExpertMap
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.lockstep import Lockstep


class DividedExperts(Protocol):
    """One layer's experts, divided over ranks."""

    @property
    def places(self) -> ExpertPlaces:
        """The ranks of the experts."""
        ...

    def tensors(self, place: int) -> list[Tensor]:
        """Returns the packed weights of the expert in one of this rank's places."""
        ...

    def run_dummy_step(self) -> None:
        """Computes other engines' tokens in a step in which this one has none."""
        ...


class ExpertParallel:
    """The division of all layers' experts over a group's ranks.

    Attributes:
        group: the ranks.
        num_engines: of the ranks.
        exchange: of tokens between engines; None if there is only one, or the model will not run.
        is_balanced: experts may be moved between ranks.
        layers: the experts of each layer that was built.
    """

    def __init__(
        self,
        group: ParallelGroup,
        placement: ExpertPlacement,
        *,
        is_balanced: bool = False,
        num_engines: int = 1,
    ) -> None:
        """Takes `is_balanced`: experts will be moved, see `ExpertBalancer`."""
        self.group = group
        self.num_engines = num_engines
        self.exchange = ExpertExchange(group) if isinstance(group, Lockstep) else None
        self._placement = placement
        self.is_balanced = is_balanced
        self.layers: list[DividedExperts] = []

    @classmethod
    def of(
        cls, config: EngineConfig, group: ParallelGroup, lockstep: Lockstep | None = None
    ) -> "ExpertParallel | None":
        """Builds the division that `config` asks for, even on one rank; None if each rank has a part of each expert.

        Args:
            group: the ranks of the engine's stage.
            lockstep: the ranks of all engines; None if these share no experts, or for a model that will not run.
        """
        num_engines = config.layout.data if config.layout.shares_experts else 1
        if config.expert_placement is None:
            return None
        if num_engines > 1:
            group = lockstep or ParallelGroup(config.place.data * group.size + group.rank, group.size * num_engines)
        return cls(group, config.expert_placement, is_balanced=config.eplb is not None, num_engines=num_engines)

    def without_layers(self) -> "ExpertParallel":
        """Returns the same division, for a model that is built once more."""
        return ExpertParallel(
            self.group, self._placement, is_balanced=self.is_balanced, num_engines=self.num_engines
        )  # fmt: skip

    @torch.inference_mode()
    def run_dummy_step(self) -> None:
        """Runs this rank's share of a step in which its engine has no tokens."""
        for layer in self.layers:
            layer.run_dummy_step()

    def place(self, num_experts: int, device: torch.device) -> ExpertPlaces:
        """Places a layer's experts.

        Raises:
            ModelLoadError: they cannot be placed as requested.
        """
        size = self.group.size
        placement = ExpertMap.initial(num_experts, size, self._placement, is_balanced=self.is_balanced)
        return ExpertPlaces(placement, self.group.rank, num_experts, device, num_engines=self.num_engines)

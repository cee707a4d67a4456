"""Experts that are divided over ranks whole: which of them a rank has, and what it computes of each token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.core.config.parallel import ExpertPlacement
from quire.core.config.resolved import EngineConfig
from quire.executor.layers.expert_exchange import ExpertExchange
from quire.executor.parallel.expert_placement import Placement
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.lockstep import Lockstep

if TYPE_CHECKING:  # it imports the context, of which this is a part
    from quire.executor.layers.experts import Experts


class ExpertParallel:
    """The division of all layers' experts over a group's ranks.

    Attributes:
        group: the ranks.
        num_engines: those that the ranks belong to.
        exchange: of tokens between these; None if there is one, or the model will not run.
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
        """`is_balanced`: experts will be placed anew, see `ExpertBalancer`."""
        self.group = group
        self.num_engines = num_engines
        self.exchange = ExpertExchange(group) if isinstance(group, Lockstep) else None
        self._placement = placement
        self._is_balanced = is_balanced
        self.layers: list[Experts] = []

    @classmethod
    def of(
        cls, config: EngineConfig, group: ParallelGroup, lockstep: Lockstep | None = None
    ) -> "ExpertParallel | None":
        """The division that `config` asks for, be it of one rank; None if each rank has a part of each expert.

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
        """The same division, for a model that is built once more."""
        return ExpertParallel(
            self.group, self._placement, is_balanced=self._is_balanced, num_engines=self.num_engines
        )  # fmt: skip

    @torch.inference_mode()
    def accompany(self) -> None:
        """This rank's share of a step in which its engine has no tokens."""
        for layer in self.layers:
            layer.accompany()

    def place(self, num_experts: int, device: torch.device) -> "ExpertPlaces":
        """The places of a layer's experts.

        Raises:
            ModelLoadError: they cannot be placed as asked.
        """
        size = self.group.size
        placement = Placement.initial(num_experts, size, self._placement, is_balanced=self._is_balanced)
        return ExpertPlaces(placement, self.group.rank, num_experts, device)


class ExpertPlaces:
    """Where the experts of one layer are.

    Attributes:
        placement: the same on every rank.
    """

    def __init__(self, placement: Placement, rank: int, num_experts: int, device: torch.device) -> None:
        self._rank = rank
        self._num_experts = num_experts
        self._device = device
        self._loads: Tensor | None = None
        self.placement = placement
        self._places, self._num_copies = self._tables(placement)

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's experts, in the order in which it keeps them."""
        return self.placement.ranks[self._rank]

    def move(self, placement: Placement) -> None:
        """From now on experts are there."""
        self.placement = placement
        self._places, self._num_copies = self._tables(placement)

    def local(self, x: Tensor, ids: Tensor) -> Tensor:
        """The places of the experts `ids` [num_tokens, top_k] among this rank's; -1 for those of other ranks.

        Which copy of an expert computes a token follows from the bits of its hidden state, `x` [num_tokens, hidden],
        which are the same on all ranks and in any batch.
        """
        if self._loads is not None:
            chosen = ids.flatten()
            self._loads.scatter_add_(0, chosen, torch.ones_like(chosen))
        if self._num_copies is None:
            return self._places[ids, 0]
        return self._places[ids, _draws(x).unsqueeze(1) % self._num_copies[ids]]

    def count(self, *, on: bool) -> None:
        """Begins to count the tokens of each expert, from 0 on, or ends it."""
        self._loads = torch.zeros(self._num_experts, dtype=torch.int64, device=self._device) if on else None

    @property
    def loads(self) -> Tensor:
        """The tokens of each expert since the count began, [num_experts] int64 on the device."""
        assert self._loads is not None, "nothing is counted"
        return self._loads

    def _tables(self, placement: Placement) -> tuple[Tensor, Tensor | None]:
        """The place here of each expert's copies, [num_experts, most copies]; and how many it has, if any has two."""
        copies: list[list[int]] = [[] for _ in range(self._num_experts)]
        for rank, own in enumerate(placement.ranks):
            for place, expert in enumerate(own):
                copies[expert].append(place if rank == self._rank else -1)
        most = max(map(len, copies))
        places = torch.tensor([[*each, *[-1] * (most - len(each))] for each in copies], dtype=torch.int64)
        counts = torch.tensor([len(each) for each in copies]) if most > 1 else None
        return places.to(self._device), None if counts is None else counts.to(self._device)


_BITS = {2: torch.int16, 4: torch.int32}
_NUM_DRAWN = 16
"""Numbers of a hidden state that decide for a copy."""


def _draws(x: Tensor) -> Tensor:
    """A number from 0 on for each row of `x`, [num_tokens] int64."""
    bits = x[:, :_NUM_DRAWN].contiguous().view(_BITS[x.dtype.itemsize]).sum(dim=1, dtype=torch.int64)
    return (bits * 0x9E3779B1 >> 15) & 0xFFFF  # the last bits of a sum are the last ones of its numbers

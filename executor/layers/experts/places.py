"""The ranks on which the experts of one layer are."""

import torch
from torch import Tensor

from quire.executor.parallel.expert_placement import ExpertMap


class ExpertPlaces:
    """The ranks and places of one layer's experts.

    Args:
        num_engines: engines with equally many of the ranks, one engine after another.

    Attributes:
        placement: the same on every rank.
        num_experts: of the layer.
    """

    def __init__(
        self, placement: ExpertMap, rank: int, num_experts: int, device: torch.device, *, num_engines: int = 1
    ) -> None:
        self._rank = rank
        self._num_engines = num_engines
        self._device = device
        self._loads: Tensor | None = None
        self.num_experts = num_experts
        self.move(placement)

    @property
    def own(self) -> tuple[int, ...]:
        """The indices of this rank's experts, in the order of its places."""
        return self.placement.ranks[self._rank]

    def move(self, placement: ExpertMap) -> None:
        """Sets a new placement."""
        self.placement = placement
        num_tensor = len(placement.ranks) // self._num_engines
        copies: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, own in enumerate(placement.ranks):
            engine, tensor = divmod(rank, num_tensor)
            if tensor != self._rank % num_tensor:
                engine = self._num_engines
            for place, expert in enumerate(own):
                copies[expert].append((place if rank == self._rank else -1, engine))
        most = max(map(len, copies))
        table = torch.tensor([each + [(-1, self._num_engines)] * (most - len(each)) for each in copies])
        self._places, self._engines = table.to(self._device).unbind(dim=2)
        counts = torch.tensor([len(each) for each in copies]) if most > 1 else None
        self._num_copies = None if counts is None else counts.to(self._device)

    def local(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the places of the experts `ids` [num_tokens, top_k] among this rank's; -1 for those of other ranks.

        The bits of a token's hidden state, `x` [num_tokens, hidden], choose among copies of an expert. They are the
        same on all ranks and in any batch.
        """
        return self._of_copies(self._places, x, ids)

    def engines(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the engine of each of the experts `ids` [num_tokens, top_k], by the ranks with this one's tensor
        coordinate.

        If another tensor coordinate has the expert, the result is the number of engines. `x` chooses among copies, as
        in `local`.
        """
        return self._of_copies(self._engines, x, ids)

    def _of_copies(self, table: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """Looks up `table` [num_experts, most copies] for the copies that compute these tokens."""
        if self._num_copies is None:
            return table[ids, 0]
        return table[ids, _draws(x).unsqueeze(1) % self._num_copies[ids]]

    def count(self, *, on: bool) -> None:
        """Starts to count the tokens of each expert from 0, or stops."""
        self._loads = torch.zeros(self.num_experts, dtype=torch.int64, device=self._device) if on else None

    def note(self, ids: Tensor) -> None:
        """Counts the experts `ids` of tokens of this rank's engine, if counting is on."""
        if self._loads is not None:
            chosen = ids.flatten()
            self._loads.scatter_add_(0, chosen, torch.ones_like(chosen))

    @property
    def loads(self) -> Tensor:
        """Returns the engine's tokens of each expert since counting began, [num_experts] int64 on the device."""
        assert self._loads is not None, "nothing is counted"
        return self._loads


_BITS = {2: torch.int16, 4: torch.int32}
_NUM_DRAWN = 16
"""Elements of a hidden state that choose a copy."""


def _draws(x: Tensor) -> Tensor:
    """Hashes each row of `x` to a non-negative integer, [num_tokens] int64."""
    bits = x[:, :_NUM_DRAWN].contiguous().view(_BITS[x.dtype.itemsize]).sum(dim=1, dtype=torch.int64)
    return (bits * 0x9E3779B1 >> 15) & 0xFFFF  # the lowest bits of a sum depend only on the lowest bits of its terms

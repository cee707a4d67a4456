"""The places of a layer's experts: which rank holds which of them, whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.config.parallel import ExpertPlacementStrategy


@dataclass(frozen=True)
class Placement:
    """The experts of a layer by rank.

    Attributes:
        ranks: for each rank, the numbers of its experts, in the order in which it keeps them.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, num_experts: int, num_ranks: int, strategy: ExpertPlacementStrategy) -> "Placement":
        """Each expert in one place; the first ranks have one more where the number of ranks does not divide theirs."""
        if strategy == "round_robin":
            return cls(tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)))
        return cls.of_slots(range(num_experts), num_ranks)

    @classmethod
    def of_slots(cls, experts: Sequence[int], num_ranks: int) -> "Placement":
        """Divides a list of experts into runs of neighbours, as equal as can be."""
        each, more = divmod(len(experts), num_ranks)
        starts = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
        return cls(tuple(tuple(experts[starts[rank] : starts[rank + 1]]) for rank in range(num_ranks)))

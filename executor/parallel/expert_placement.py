"""Assigns a layer's experts to ranks, each expert whole, and balances the assignment for a load."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from quire.core.config.parallel import ExpertPlacement
from quire.core.errors import ModelLoadError


@dataclass(frozen=True)
class ExpertMap:
    """The experts of a layer by rank.

    Attributes:
        ranks: for each rank, the indices of its experts, in the order of its places.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, asked: ExpertPlacement, *, is_balanced: bool) -> "ExpertMap":
        """Divides experts in order; the first ranks have one more if the number of ranks does not divide that of
        experts.

        Args:
            is_balanced: experts will move between ranks, so all ranks need the same number.

        Raises:
            ModelLoadError: they cannot have the same number.
        """
        if asked.strategy == "round_robin":
            return cls(tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)))
        more, num_places = asked.num_redundant, num_experts + asked.num_redundant
        if is_balanced and num_places % num_ranks:
            raise ModelLoadError(
                f"--enable-eplb needs as many experts on each of {num_ranks} ranks, and {num_experts} with "
                f"num_redundant_experts {more} are {num_places}: set --eplb-config.num_redundant_experts "
                f"{more + -num_places % num_ranks}."
            )
        if more > num_experts * (num_ranks - 1):
            raise ModelLoadError(
                f"--eplb-config.num_redundant_experts {more} is more than the {num_experts * (num_ranks - 1)} copies "
                f"that give each of {num_ranks} ranks all {num_experts} experts; lower it."
            )
        experts = [place % num_experts for place in range(num_places)]
        each, rest = divmod(num_places, num_ranks)
        starts = [rank * each + min(rank, rest) for rank in range(num_ranks + 1)]
        return cls(tuple(tuple(experts[starts[rank] : starts[rank + 1]]) for rank in range(num_ranks)))

    @property
    def num_experts(self) -> int:
        """The number of different experts; each has at least one place."""
        return len(set(chain.from_iterable(self.ranks)))

    def rank_loads(self, loads: Sequence[int]) -> list[float]:
        """Computes the load of each rank if expert i has `loads[i]` tokens, and its copies share them."""
        copies = self._copies()
        return [sum(loads[expert] / copies[expert] for expert in own) for own in self.ranks]

    def imbalance(self, loads: Sequence[int]) -> float:
        """Divides the load of the busiest rank by the mean; 1 is the best, and the value without any load."""
        ranks = self.rank_loads(loads)
        return max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0

    def balanced(self, loads: Sequence[int]) -> "ExpertMap":
        """Finds an assignment to the same places with a better balance of `loads`; returns this one if there is none.

        Two greedy steps. First, each expert gets a copy, and each further copy goes to the expert with the highest load
        per copy. Then the copies are placed, the heaviest first, each on the least loaded rank with a free place and no
        copy of this expert (longest processing time first: Graham, 1969, with bounded bins). A copy that stays on its
        rank keeps its place there.
        """
        num_ranks, num_experts = len(self.ranks), self.num_experts
        copies = [1] * num_experts
        for _ in range(sum(map(len, self.ranks)) - num_experts):
            heaviest = max(
                (expert for expert in range(num_experts) if copies[expert] < num_ranks),
                key=lambda expert: (loads[expert] / copies[expert], -expert),
            )
            copies[heaviest] += 1
        share = [load / count for load, count in zip(loads, copies, strict=True)]
        # Among equals, experts with many copies come first, while more ranks have no copy of them.
        order = sorted(range(num_experts), key=lambda expert: (-share[expert], -copies[expert], expert))
        placed: list[set[int]] = [set() for _ in self.ranks]
        work = [0.0] * num_ranks
        for expert in order:
            for _ in range(copies[expert]):
                open_ranks = [
                    rank
                    for rank, own in enumerate(placed)
                    if len(own) < len(self.ranks[rank]) and expert not in own
                ]  # fmt: skip
                if not open_ranks:
                    return self
                rank = min(open_ranks, key=lambda rank: (work[rank], rank))
                placed[rank].add(expert)
                work[rank] += share[expert]
        found = ExpertMap(tuple(_stable_order(own, wanted) for own, wanted in zip(self.ranks, placed, strict=True)))
        return found if found.imbalance(loads) < self.imbalance(loads) else self

    def _copies(self) -> list[int]:
        copies = [0] * self.num_experts
        for expert in chain.from_iterable(self.ranks):
            copies[expert] += 1
        return copies


@dataclass(frozen=True)
class Move:
    """The move of one expert's weights to a place on another rank, or on the same one."""

    expert: int
    source: int  # rank
    source_place: int
    target: int  # rank
    target_place: int


def moves_between(before: ExpertMap, after: ExpertMap) -> list[Move]:
    """Lists the moves from `before` to `after`. Each reads a place as it was before all moves. Equal on all ranks."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, own in enumerate(before.ranks):
        for place, expert in enumerate(own):
            holders.setdefault(expert, []).append((rank, place))
    moves: list[Move] = []
    for rank, own in enumerate(after.ranks):
        for place, expert in enumerate(own):
            if before.ranks[rank][place] == expert:
                continue
            sources = holders[expert]
            here = [source for source in sources if source[0] == rank]
            source, source_place = here[0] if here else sources[len(moves) % len(sources)]
            moves.append(Move(expert, source, source_place, rank, place))
    return moves


def _stable_order(own: Sequence[int], wanted: set[int]) -> tuple[int, ...]:
    """Orders `wanted` so that the members of `own` keep their places."""
    left, kept = set(wanted), []
    for expert in own:
        kept.append(expert if expert in left else None)
        left.discard(expert)
    rest = iter(sorted(left))
    return tuple(next(rest) if expert is None else expert for expert in kept)

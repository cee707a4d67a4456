"""The places of a layer's experts: which rank holds which of them, whole, and which placement suits a load."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from quire.core.config.parallel import ExpertPlacement
from quire.core.errors import ModelLoadError


@dataclass(frozen=True)
class Placement:
    """The experts of a layer by rank.

    Attributes:
        ranks: for each rank, the numbers of its experts, in the order in which it keeps them.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def initial(cls, num_experts: int, num_ranks: int, asked: ExpertPlacement, *, is_balanced: bool) -> "Placement":
        """The first ranks have one more where the number of ranks does not divide the number of experts.

        Args:
            is_balanced: places will be exchanged between ranks, so all have the same number.

        Raises:
            ModelLoadError: they cannot.
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
        """Different experts; each has a place at least."""
        return len(set(chain.from_iterable(self.ranks)))

    def rank_loads(self, loads: Sequence[int]) -> list[float]:
        """What each rank has to do if expert i has `loads[i]` tokens, and its copies share them."""
        copies = self._copies()
        return [sum(loads[expert] / copies[expert] for expert in own) for own in self.ranks]

    def imbalance(self, loads: Sequence[int]) -> float:
        """The load of the busiest rank over the mean; 1 is best, and what no load has."""
        ranks = self.rank_loads(loads)
        return max(ranks) * len(ranks) / sum(ranks) if sum(ranks) else 1.0

    def balanced(self, loads: Sequence[int]) -> "Placement":
        """A placement in as many places that suits `loads` better, or this one if none is found.

        Two greedy steps. First, each expert gets a copy, and each further copy goes to the expert whose copies have
        most to do. Then the copies are placed, the heaviest first, each on the rank with the least to do that has a
        place left and has no copy of this expert (longest processing time first: Graham, 1969, with bounded bins).
        What stays on a rank keeps its place there.
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
        # Among equals, experts with many copies come first: later ones find fewer ranks without them.
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
        found = Placement(tuple(_kept(own, wanted) for own, wanted in zip(self.ranks, placed, strict=True)))
        return found if found.imbalance(loads) < self.imbalance(loads) else self

    def _copies(self) -> list[int]:
        copies = [0] * self.num_experts
        for expert in chain.from_iterable(self.ranks):
            copies[expert] += 1
        return copies


@dataclass(frozen=True)
class Move:
    """One expert's weights on their way to a place of another rank, or of the same one."""

    expert: int
    source: int  # rank
    source_place: int
    target: int  # rank
    target_place: int


def moves_between(before: Placement, after: Placement) -> list[Move]:
    """What makes `after` of `before`: each move reads a place as it was before all moves. The same on every rank."""
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


def _kept(own: Sequence[int], wanted: set[int]) -> tuple[int, ...]:
    """`wanted` in an order in which those of `own` keep their places."""
    left, kept = set(wanted), []
    for expert in own:
        kept.append(expert if expert in left else None)
        left.discard(expert)
    rest = iter(sorted(left))
    return tuple(next(rest) if expert is None else expert for expert in kept)

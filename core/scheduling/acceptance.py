"""How often drafts were right, by their position in a row."""

_KEEP = 0.95
"""What an observation still counts after the next one."""
_PRIOR = 4.0
"""Observations that the expectation of others is worth."""
HOPE = 0.8
"""The expectation before anything was seen."""


class Acceptance:
    """The probability that a draft is right if those before it are.

    Args:
        others: what is known of other requests; None: nothing.
        keep: what an observation still counts after the next one.
    """

    __slots__ = ("_hits", "_keep", "_others", "_tries", "num_seen", "supply")

    def __init__(self, others: "Acceptance | None" = None, keep: float = _KEEP) -> None:
        self._others = others
        self._keep = keep
        self._tries: list[float] = []
        self._hits: list[float] = []
        self.num_seen = 0  # rows with drafts
        self.supply: float = 1.0 if others is None else others.supply  # the share of steps in which there are drafts

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in a row of which the first `num_accepted` drafts were right."""
        self.num_seen += 1
        keep, tries, hits = self._keep, self._tries, self._hits
        for place in range(min(num_drafts, num_accepted + 1)):
            if place == len(tries):
                tries.append(0.0)
                hits.append(0.0)
            tries[place] = keep * tries[place] + 1
            hits[place] = keep * hits[place] + (place < num_accepted)
        if self._others is not None:
            self._others.add(num_drafts, num_accepted)

    def add_supply(self, has_drafts: bool) -> None:
        """Takes in whether there were drafts when they were asked for."""
        self.supply += 0.1 * (has_drafts - self.supply)
        if self._others is not None:
            self._others.add_supply(has_drafts)

    def at(self, place: int) -> float:
        """The probability at a position, from 0."""
        expected = HOPE if self._others is None else self._others.at(place)
        if place >= len(self._tries):
            return expected if self._others is not None or not self._tries else self.at(len(self._tries) - 1)
        return (self._hits[place] + _PRIOR * expected) / (self._tries[place] + _PRIOR)

    def best(self, most: int, price: float) -> tuple[int, float]:
        """The number of drafts of which each is worth its price, `most` at most, and the tokens that they bring.

        Args:
            price: of a draft, in tokens.
        """
        reached, gain = 1.0, 0.0
        for place in range(most):
            reached *= self.at(place)
            if reached <= price:
                return place, gain
            gain += reached
        return most, gain

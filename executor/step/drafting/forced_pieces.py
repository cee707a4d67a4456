"""Drafts that cost nothing: the pieces of text that a request's grammar lets follow alone, such as JSON's keys."""

from quire.core.wire.protocol import NewSlot
from quire.executor.sampling.sampler import Sampler


class ForcedPieces:
    """Reads them from the matchers of the sampler's grammars."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def admit(self, request: NewSlot) -> None:
        """Does nothing: the sampler has the grammar."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""

    def __contains__(self, slot: int) -> bool:
        return self._sampler.has_grammar(slot)

    def drafts(self, slot: int, num_known: int, most: int) -> list[int]:
        """The tokens that the grammar forces, `most` at most. Waits for the step's tokens."""
        return self._sampler.forced_tokens(slot, most)

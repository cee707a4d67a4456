"""Makes the moves of plans on one rank: copies of pages between tiers, before and after a step's rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.core.wire.page_moves import PageMove, Tier
from quire.core.wire.protocol import StepPlan
from quire.executor.step.page_tiers import CachePages, PageTier
from quire.executor.transfers import Transfer


class _Started(NamedTuple):
    """A move whose source is being read."""

    move: PageMove
    content: Transfer


class PageMoves:
    """Moves pages between the tiers of one rank.

    Args:
        tiers: those that the rank has. Moves of states are for ranks with recurrent layers, and others skip them.
        cache: the tier "device".
        block_size: tokens of a page, as block tables count them.
        may_outlast_steps: slow moves with ids end in later steps. False with several ranks: only one of them reports
            what is done, so each waits for its own moves.
    """

    def __init__(
        self, cache: CachePages, tiers: Mapping[Tier, PageTier], block_size: int, *, may_outlast_steps: bool = True
    ) -> None:
        self._cache = cache
        self._block_size = block_size
        self._may_outlast_steps = may_outlast_steps
        self._tiers: dict[Tier, PageTier] = {"device": cache, **tiers}
        self._started: list[_Started] = []
        self._moved: list[int] = []

    def before(self, plan: StepPlan) -> None:
        """Makes the moves that come before the plan's rows, then clears pages of states that will hold tokens.

        A plan without rows waits until the oldest slow move is done.
        """
        if self._started:
            self._finish(waits=not plan.slots)
        if plan.moves_before:
            self._make(plan.moves_before)
        if self._cache.has_held_states:
            self._clear(plan)

    def after(self, plan: StepPlan) -> None:
        """Makes the moves that come after the plan's rows."""
        if plan.moves_after:
            self._make(plan.moves_after)

    def drain(self) -> list[int]:
        """Returns the ids of moves that were done since the last call."""
        moved, self._moved = self._moved, []
        return moved

    def _clear(self, plan: StepPlan) -> None:
        """Clears pages of states that will hold tokens.

        Those of a prefix hold its tokens already. Besides, a block table has page 0 for blocks of the prefix without a
        page, and page 0 itself may hold a state.
        """
        num_computed = dict(zip(plan.slots, plan.num_computed, strict=True))
        for request in plan.admitted:
            first = num_computed.get(request.slot, 0) // self._block_size
            self._cache.clear_states([pages[first:] for pages in request.page_ids])
        for _, page_ids in plan.appended_pages:
            self._cache.clear_states(page_ids)

    def _make(self, moves: Sequence[PageMove]) -> None:
        for move in moves:
            if "state" in (move.source, move.target) and "state" not in self._tiers:
                continue
            content = self._tier(move.source).read(move.source_pages)
            if self._may_outlast_steps and move.move_id is not None and not content.is_done:
                self._started.append(_Started(move, content))
            else:
                self._write(move, content)

    def _finish(self, *, waits: bool) -> None:
        """Ends slow moves whose sources are read; `waits` for the oldest at least."""
        started, self._started = self._started, []
        for number, each in enumerate(started):
            if each.content.is_done or (waits and not number):
                self._write(*each)
            else:
                self._started.append(each)

    def _write(self, move: PageMove, content: Transfer) -> None:
        source, target = self._tier(move.source), self._tier(move.target)
        [values] = content.values()
        target.write(move.target_pages, values)
        same = len(move.source_pages) == len(move.target_pages)
        holds = source.holds_states(move.source_pages)
        target.mark(move.target_pages, holds if same else bool(holds.any()))
        if move.move_id is not None:
            self._moved.append(move.move_id)

    def _tier(self, name: Tier) -> PageTier:
        assert name in self._tiers, f"a plan moves pages of the tier {name!r}, which this worker does not have"
        return self._tiers[name]

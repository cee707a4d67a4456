"""Proposes drafts from all sources: what a grammar forces, what a client predicts, and a method's guesses."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.slot_state import SlotState
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens, Speculator
from quire.executor.transfers import to_device


class HostSource(SlotState, Protocol):
    """Has drafts on the host for some requests. It reads their tokens, so that their steps' launches wait for these."""

    def __contains__(self, slot: int) -> bool:
        """Returns True if it may have drafts for the request in `slot`."""
        ...

    def drafts(self, slot: int, num_known: int, most: int) -> list[int]:
        """Returns valid tokens for the positions from `num_known` on, `most` at most."""
        ...


class Drafter:
    """A speculator of several sources. The first host source that has drafts for a request wins over the method.

    Args:
        method: guesses; None: nothing does.
        sources: in order.
        most_drafts: of a row of a host source.
    """

    def __init__(self, method: Speculator | None, sources: Sequence[HostSource], most_drafts: int) -> None:
        self._method = method
        self._sources = sources
        self._most_drafts = most_drafts
        self.reads = ForwardReads() if method is None else method.reads
        self.sees_all_steps = method is not None and method.sees_all_steps

    def admit(self, request: NewSlot) -> None:
        for each in self._all:
            each.admit(request)

    def release(self, slots: list[int]) -> None:
        for each in self._all:
            each.release(slots)

    @property
    def _all(self) -> list[SlotState]:
        return [*self._sources, *([] if self._method is None else [self._method])]

    def acts_in(self, plan: StepPlan) -> bool:
        """Returns True if `propose` has to be called in this step."""
        if self.sees_all_steps:
            return True
        if plan.draft_limits is not None:
            return any(plan.draft_limits)
        return self._method is not None or any(slot in source for source in self._sources for slot in plan.slots)

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        asked = np.flatnonzero(sampled.wants_drafts)
        given = self._from_host(asked, sampled)
        guesses, rest = None, asked[:0]
        if self._method is not None and (len(given) < len(asked) or self.sees_all_steps):
            wants = sampled.wants_drafts.copy()
            wants[list(given)] = False
            rest = np.flatnonzero(wants)
            guesses = self._method.propose(forward, sampled._replace(wants_drafts=wants), table)
        if guesses is not None and not given:
            return guesses
        num_guessed = 0 if guesses is None else guesses.token_ids.shape[1]
        rows = np.zeros((len(asked), max([num_guessed, *map(len, given.values())])), np.int64)
        counts = np.zeros(len(asked), np.int64)
        for place, drafts in zip(np.searchsorted(asked, [*given]).tolist(), given.values(), strict=True):
            rows[place, : len(drafts)] = drafts
            counts[place] = len(drafts)
        proposal = Proposal(to_device(rows, table.device), to_device(counts, table.device))
        if guesses is not None and len(rest):
            index = to_device(np.searchsorted(asked, rest), table.device)
            proposal.token_ids[index, :num_guessed] = guesses.token_ids
            proposal.num_drafts[index] = guesses.num_drafts
        return proposal

    def _from_host(self, asked: np.ndarray, sampled: SampledTokens) -> dict[int, list[int]]:
        """Returns the drafts of host sources, by row of `sampled`, in order."""
        given: dict[int, list[int]] = {}
        num_known: list[int] | None = None
        for row, slot in zip(asked.tolist(), sampled.slots[asked].tolist(), strict=True):
            most = self._most_drafts if sampled.limits is None else min(self._most_drafts, int(sampled.limits[row]))
            for source in self._sources:
                if slot not in source:
                    continue
                num_known = sampled.num_known.tolist() if num_known is None else num_known
                if drafts := source.drafts(slot, num_known[row], most):
                    given[row] = drafts
                    break
        return given

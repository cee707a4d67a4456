"""thinking_token_budget: closes reasoning that has used its budget, by allowing only the tokens of its end mark."""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot
from quire.core.wire.sampling_params import ThinkingMarks
from quire.executor.sampling.sampling_feature import FollowingMask, SampleBatch, drafts_between


class Thinking:
    """The progress of one request's output: inside its reasoning or not, and after how many of its tokens.

    Args:
        num_tokens: the budget of each section of reasoning.
        output: tokens from before a preemption or restart.
    """

    def __init__(self, marks: ThinkingMarks, num_tokens: int, output: Sequence[int]) -> None:
        self._marks = marks
        self._budget = num_tokens
        self._count = 0 if marks.opened else -1  # tokens since the reasoning began; -1 outside of it
        self._num_forced = 0
        self._tail: list[int] = []
        self.push(output)

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None when all may."""
        if self._count < self._budget:
            return None
        return self._marks.end[0][self._num_forced]

    def after(self, token_ids: Sequence[int]) -> "Thinking | None":
        """The progress after more tokens, as another object; None: one is not the forced one, so nothing follows."""
        other = copy(self)
        other._tail = self._tail.copy()
        for token_id in token_ids:
            if other.forced not in (None, token_id):
                return None
            other.push([token_id])
        return other

    def push(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the output."""
        for token_id in token_ids:
            self._num_forced += self.forced is not None
            self._tail.append(token_id)
            if self._count < 0:
                self._count = 0 if self._ends_with(self._marks.begin) else -1
            else:
                self._count += 1
                if self._ends_with(self._marks.end):
                    self._count, self._num_forced = -1, 0
        del self._tail[: -self._marks.longest]

    def _ends_with(self, marks: list[list[int]]) -> bool:
        return any(self._tail[-len(mark) :] == mark for mark in marks)


class ThinkingBudget(FollowingMask):
    """Closes reasoning at its budget. Comes after all other masks and logits processors."""

    def __init__(self, max_num_seqs: int) -> None:
        self._used = np.zeros(max_num_seqs, bool)
        self._states: dict[int, Thinking] = {}  # by slot
        self._drafts: dict[int, list[int]] = {}  # by slot, of the current step

    def admit(self, request: NewSlot) -> bool:
        params = request.sampling
        self._states.pop(request.slot, None)
        self._used[request.slot] = wanted = params.thinking_token_budget is not None and params.thinking is not None
        if params.thinking_token_budget is not None and params.thinking is not None:
            output = request.token_ids[request.num_prompt_tokens :]
            self._states[request.slot] = Thinking(params.thinking, params.thinking_token_budget, output)
        return wanted

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            self._states.pop(slot, None)

    def used(self, batch: SampleBatch) -> np.ndarray:
        return self._used[batch.slots]

    def apply(self, logits: torch.Tensor, rows: np.ndarray, batch: SampleBatch) -> None:
        self._drafts |= drafts_between(batch)  # a step may come in parts
        num_seen: dict[int, int] = {}  # by slot, rows
        for row, slot in zip(rows.tolist(), batch.slots.tolist(), strict=True):
            place = num_seen.get(slot, 0)
            num_seen[slot] = place + 1
            state = self._states[slot].after(self._drafts[slot][:place]) if place else self._states[slot]
            if state is not None and (token_id := state.forced) is not None:
                logits[row] = -torch.inf
                logits[row, token_id] = 0

    def advance(self, slots: np.ndarray, token_ids: list[int], usable: list[bool]) -> list[int]:
        """Advances each request's progress. No later feature can bring a token back, so no row is returned."""
        settled: set[int] = set()
        for slot, token_id, is_usable in zip(slots.tolist(), token_ids, usable, strict=True):
            if slot in settled or (state := self._states.get(slot)) is None:
                continue
            if is_usable:
                state.push([token_id])
            drafts = self._drafts.get(slot)
            if not is_usable or not drafts or drafts.pop(0) != token_id:
                settled.add(slot)
        self._drafts = {}
        return []

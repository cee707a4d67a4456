"""A speculator of heads that read a sequence's last hidden state, and keep nothing: Medusa, MLP speculators."""

from typing import Self

import numpy as np
import torch

from quire.core.config.resolved import EngineConfig
from quire.core.wire.protocol import NewSlot
from quire.executor.models.base import LastStateHeads, Model
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import to_device


class LastStateDrafts:
    """Runs the heads on the hidden state that made each row's newest token.

    Args:
        num_drafts: tokens proposed for a row.
    """

    reads = ForwardReads(hidden=True)
    sees_all_steps = False

    def __init__(self, model: LastStateHeads, *, num_drafts: int) -> None:
        self._model = model
        self._num_drafts = min(num_drafts, model.most_drafts)

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return cls.reads

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Does nothing: layers that do not fit their target are refused as they are built."""

    @classmethod
    def build(cls, parts: MethodParts) -> Self:
        assert parts.draft is not None
        assert isinstance(parts.draft.model, LastStateHeads)
        return cls(parts.draft.model, num_drafts=parts.speculation.num_tokens)

    def admit(self, request: NewSlot) -> None:
        """Does nothing: there is no state."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        rows, plan = sampled.rows[sampled.wants_drafts], forward.plan
        num_drafts = sampled.limit(self._num_drafts)
        if not len(rows) or not num_drafts:
            nothing = torch.zeros(len(rows), 1, dtype=torch.int64, device=table.device)
            return Proposal(nothing, nothing[:, 0])
        assert forward.hidden is not None
        scheduled = np.asarray(plan.num_scheduled, np.int64)
        # A row's first place in the hidden states, less that place's position.
        shifts = (np.cumsum(scheduled) - scheduled - np.asarray(plan.num_computed, np.int64))[rows]
        slots = to_device(np.asarray(plan.slots, np.int64)[rows], table.device)
        num_known = sampled.num_known[to_device(np.flatnonzero(sampled.wants_drafts), table.device)]
        states = forward.hidden[num_known - 2 + to_device(shifts, table.device)]
        newest = table.token_ids[slots, num_known - 1].long()
        return Proposal(self._model.guess(newest, states, num_drafts), torch.full_like(num_known, num_drafts))

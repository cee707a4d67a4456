"""A speculator of layers that read the target's hidden states: multi-token prediction, and EAGLE.

A pair of the target's states at a position and the token after it has its keys and values at that position, in the
pages of the target's blocks as further layers (`draft_model.py`). The last pair of a page depends on the first token of
the next one. So where a cached prefix ends with a page, and the tokens differ from there on, that pair is of the other
tokens: it may cost a draft, and never changes a token.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.executor.models.base import DraftHeads
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.drafting.state_drafts import StateDrafts
from quire.executor.step.drafting.target_pairs import TargetPairs, choose, states_of
from quire.executor.step.drafts import Proposal
from quire.executor.step.input_batch import build_input_batch
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, SampledTokens
from quire.executor.transfers import to_device


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Pairs of some rows: of consecutive positions, with tokens that the table has.

    Attributes:
        slots: [num_rows] int64.
        starts: [num_rows] int64; the position of each row's first pair.
        counts: [num_rows] int64; each row's pairs.
        wanted: [num_rows] int64; 1 for rows whose last pair makes a draft, else 0.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    wanted: np.ndarray


class HeadDrafts(StateDrafts[DraftHeads]):
    """Runs the layers on all tokens of each step, then on its own drafts, one after another.

    It reads the number of accepted tokens, so on an accelerator the launch waits for the step.
    """

    KIND = DraftHeads

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        pairs = TargetPairs.of(forward.plan, sampled)
        fits = pairs.fits(table, self._max_positions)
        num_drafts = pairs.num_drafts(table, self._num_drafts, self._max_positions)
        wanted = np.zeros(len(fits), np.int64)
        wanted[pairs.asked] = num_drafts > 0
        drafts = torch.zeros(len(num_drafts), self._num_drafts, dtype=torch.int64, device=table.device)
        if fits.any():
            states = states_of(forward, self.reads.layers, np.where(fits, pairs.counts, 0))
            rows = _Rows(pairs.slots[fits], pairs.starts[fits], pairs.counts[fits], wanted[fits])
            num_known = pairs.num_known[pairs.asked]
            self._draft(table, rows, self._model.read_target(states), num_known, num_drafts, drafts)
        return Proposal(drafts, to_device(num_drafts, table.device))

    def _draft(
        self,
        table: RequestTable,
        rows: _Rows,
        states: Tensor,
        num_known: np.ndarray,
        num_drafts: np.ndarray,
        drafts: Tensor,
    ) -> None:
        """Computes the pairs of `rows`, and writes drafts into `drafts` [num_asked, most]: `num_drafts` of each row."""
        going = np.flatnonzero(num_drafts)
        slots = rows.slots[rows.wanted > 0]
        for column in range(self._num_drafts):
            states = self._compute(table, rows, states)
            if not len(going):
                return
            logits = self._model.compute_logits(states)[:, : self._vocab_size]
            places = num_known[going] + column
            token_ids = choose(logits, self._sampler, SampleBatch(slots, places, table))
            drafts[to_device(going, table.device), column] = token_ids
            table.write(slots, places, token_ids)
            goes_on = num_drafts[going] > column + 1
            going, slots = going[goes_on], slots[goes_on]
            if not len(going):
                return
            states = states if goes_on.all() else states[to_device(np.flatnonzero(goes_on), states.device)]
            ones = np.ones(len(going), np.int64)
            rows = _Rows(slots, num_known[going] - 1 + column, ones, ones)

    def _compute(self, table: RequestTable, rows: _Rows, states: Tensor) -> Tensor:
        """Computes the pairs of `rows` from `states`, one for each; returns the hidden states of the wanted rows."""
        columns = (rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), rows.wanted.tolist())
        batch = build_input_batch(StepPlan(0, [], [], *columns, []), table, num_ahead=1)
        return self._forward.draft(batch, states)

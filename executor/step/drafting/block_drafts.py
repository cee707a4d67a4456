"""A speculator of layers that make all drafts of a sequence at once, in the places of mask tokens: DFlash."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.protocol import StepPlan
from quire.executor.models.base import BlockDraftHeads
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.drafting.state_drafts import StateDrafts
from quire.executor.step.drafting.target_pairs import TargetPairs, choose, states_of
from quire.executor.step.drafts import Proposal
from quire.executor.step.input_batch import build_input_batch
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, SampledTokens
from quire.executor.transfers import to_device


class BlockDrafts(StateDrafts[BlockDraftHeads]):
    """Keeps what the layers make of the target's states of each step's tokens, then runs a block for each row.

    A block's own keys and values lie past those, where the next step's overwrite them.
    """

    KIND = BlockDraftHeads

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        pairs = TargetPairs.of(forward.plan, sampled)
        num_drafts = pairs.num_drafts(table, self._num_drafts, self._max_positions)
        fits = pairs.fits(table, self._max_positions)
        if fits.any():
            states = states_of(forward, self.reads.layers, np.where(fits, pairs.counts, 0))
            plan = _plan(pairs.slots[fits], pairs.starts[fits], pairs.counts[fits], np.zeros(fits.sum(), np.int64))
            self._forward.draft(build_input_batch(plan, table), self._model.read_target(states))
        drafts = torch.zeros(len(num_drafts), self._num_drafts, dtype=torch.int64, device=table.device)
        rows = np.flatnonzero(num_drafts)
        if len(rows):
            asked = pairs.asked[rows]
            found = self._run_blocks(table, pairs.slots[asked], pairs.num_known[asked], num_drafts[rows])
            places = np.repeat(rows, num_drafts[rows]) * self._num_drafts + _columns(num_drafts[rows])
            drafts.view(-1)[to_device(places, table.device)] = found
        return Proposal(drafts, to_device(num_drafts, table.device))

    def _run_blocks(self, table: RequestTable, slots: np.ndarray, num_known: np.ndarray, counts: np.ndarray) -> Tensor:
        """Returns `counts` drafts of each row, one after another."""
        masks = torch.full((int(counts.sum()),), self._model.mask_token_id, device=table.device)
        owners, places = np.repeat(slots, counts), np.repeat(num_known, counts) + _columns(counts)
        table.write(owners, places, masks)
        starts = num_known - 1
        batch = build_input_batch(_plan(slots, starts, counts + 1, counts), table)
        blocks = [[(start, end)] for start, end in zip(starts.tolist(), (num_known + counts).tolist(), strict=True)]
        logits = self._forward.logits(dataclasses.replace(batch, prefix_spans=blocks))
        return choose(logits[:, : self._vocab_size], self._sampler, SampleBatch(owners, places, table))


def _plan(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> StepPlan:
    return StepPlan(0, [], [], slots.tolist(), starts.tolist(), counts.tolist(), wanted.tolist(), [])


def _columns(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... up to each count, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

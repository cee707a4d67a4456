"""A speculator of layers that make all drafts of a sequence at once, in the places of mask tokens: DFlash."""

import dataclasses
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire.core.config.resolved import EngineConfig
from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.models.base import BlockDraftHeads, Model
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.drafting.method import MethodParts
from quire.executor.step.drafting.target_pairs import TargetPairs, choose, options_of, reads, reads_of, states_of
from quire.executor.step.drafts import Proposal
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import build_input_batch
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import to_device


class BlockDrafts:
    """Keeps what the layers make of the target's states of each step's tokens, then runs a block for each row.

    A block's own keys and values lie past those, where the next step's overwrite them. The arguments are those of
    `HeadDrafts`.
    """

    sees_all_steps = True

    def __init__(
        self,
        model: BlockDraftHeads,
        forward: Forward,
        sampler: Sampler | None,
        *,
        num_drafts: int,
        vocab_size: int,
        max_positions: int,
    ) -> None:
        self.reads = reads(model.target_layers)
        self._model = model
        self._forward = forward
        self._sampler = sampler
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size
        self._max_positions = max_positions

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return reads_of(config)

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Does nothing: layers that do not fit their target are refused as they are built."""

    @classmethod
    def build(cls, parts: MethodParts) -> Self:
        assert parts.draft is not None
        assert isinstance(parts.draft.model, BlockDraftHeads)
        return cls(parts.draft.model, parts.draft.forward, **options_of(parts))

    def admit(self, request: NewSlot) -> None:
        """Does nothing: all state is in pages."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""

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

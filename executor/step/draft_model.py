"""A speculator that is a model: a smaller one decodes greedily, a few tokens ahead of the target model.

Its layers have keys and values in the pages of the target's blocks, as further layers of the same KV groups or as
groups of their own (`KVLayout`). So the scheduler's block tables, the prefix cache and preemption serve both models.
Drafts have places in pages that requests hold ahead (`SchedulerLimits.num_lookahead_tokens`).
"""

import numpy as np
import torch

from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.drafts import Proposal
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import build_input_batch, without_padding
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import to_device


class DraftModel:
    """Runs the draft model on all tokens of each step, then on its own drafts, one after another.

    It reads the number of accepted tokens, so on an accelerator the launch waits for the step.

    Args:
        forward: the draft model with its caches.
        recorded: its decode steps.
        num_drafts: tokens proposed for a row.
        vocab_size: of the target; the draft model may have more logits.
        max_positions: the most tokens of a request that both models compute.
    """

    reads = ForwardReads()

    def __init__(
        self,
        forward: Forward,
        recorded: RecordedSteps,
        table: RequestTable,
        *,
        num_drafts: int,
        vocab_size: int,
        max_positions: int,
    ) -> None:
        self._forward = forward
        self._recorded = recorded
        self._decode_inputs = DecodeInputs(table, recorded.choose_shape)
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size
        self._max_positions = max_positions

    def admit(self, request: NewSlot) -> None:
        """Does nothing: all state is in pages."""

    def release(self, slots: list[int]) -> None:
        """Does nothing."""

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        plan = forward.plan
        slots, starts = np.asarray(plan.slots, np.int64), np.asarray(plan.num_computed, np.int64)
        ends = starts + np.asarray(plan.num_scheduled, np.int64)
        ends[sampled.rows] = sampled.num_known.tolist()  # without rejected drafts, and with the newest token
        asked = sampled.rows[sampled.wants_drafts]
        # Tokens that are given as embeddings have no ids, and positions may end before the target's.
        fits = (table.num_unnamed[slots] == 0) & (ends <= self._max_positions)
        counts = np.where(fits, np.minimum(self._num_drafts, self._max_positions - ends), 0)[asked]
        wanted = np.zeros(len(slots), np.int64)
        wanted[asked] = counts > 0
        drafts = torch.zeros(len(asked), self._num_drafts, dtype=torch.int64, device=table.device)
        if fits.any():
            first = self._decode(table, slots[fits], starts[fits], (ends - starts)[fits], wanted[fits])
            self._continue(table, slots[asked], ends[asked], counts, first, drafts)
        return Proposal(drafts, to_device(counts, table.device))

    def _continue(
        self,
        table: RequestTable,
        slots: np.ndarray,
        num_known: np.ndarray,
        counts: np.ndarray,
        token_ids: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """Writes `counts` drafts of each row into `drafts` [num_rows, most]; `token_ids` are the first ones."""
        for column in range(self._num_drafts):
            going = np.flatnonzero(counts > column)
            if column:
                if not len(going):
                    return
                ones = np.ones(len(going), np.int64)
                token_ids = self._decode(table, slots[going], num_known[going] + column - 1, ones, ones)
            drafts[to_device(going, table.device), column] = token_ids
            table.write(slots[going], num_known[going] + column, token_ids)

    def _decode(
        self,
        table: RequestTable,
        slots: np.ndarray,
        starts: np.ndarray,
        num_tokens: np.ndarray,
        num_wanted: np.ndarray,
    ) -> torch.Tensor:
        """Computes the tokens of rows; returns the likeliest next token of those that want one, [num_wanted] int64."""
        columns = (slots.tolist(), starts.tolist(), num_tokens.tolist(), num_wanted.tolist())
        plan = StepPlan(0, [], [], *columns, [])
        decode = self._decode_inputs.build(plan)
        batch = decode or build_input_batch(plan, table)
        output = None if decode is None else self._recorded.run(decode)
        logits = self._forward.logits(batch) if output is None else output.logits
        return without_padding(logits, batch)[:, : self._vocab_size].argmax(-1)

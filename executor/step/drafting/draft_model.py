"""A smaller model: decodes a few tokens ahead of the target.

Its layers have keys and values in the pages of the target's blocks, as further layers of the same KV groups or as
groups of their own (`KVLayout`). So the scheduler's block tables, the prefix cache and preemption serve both models.
Drafts have places in pages that requests hold ahead (`SchedulerLimits.num_lookahead_tokens`).
"""

from typing import NamedTuple

import numpy as np
import torch

from quire.core.config.resolved import EngineConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import NewSlot, StepPlan
from quire.executor.models.base import Model
from quire.executor.sampling.sampler import Sampler
from quire.executor.sampling.sampling_feature import SampleBatch
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.drafting.draft_vocabulary import DraftVocabulary, SameTokens, TokensByText
from quire.executor.step.drafting.method import LoadedDraft, MethodParts
from quire.executor.step.drafts import Proposal
from quire.executor.step.input_batch import build_input_batch, without_padding
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.transfers import to_device


class DraftModel:
    """Runs the draft model on all tokens of each step, then on its own drafts, one after another.

    While no request may have drafts, the model rests. It computes the tokens that it has missed when one may again; a
    cached prefix without its keys and values only makes its drafts worse.

    It reads the number of accepted tokens, so on an accelerator the launch waits for the step.

    One that was trained with a mask token makes all drafts at once, each in the place of a mask (PARD,
    arXiv:2504.18583). Keys and values of masks lie where those of rejected drafts do.

    Args:
        draft: the model with its caches.
        sampler: draws drafts as it draws tokens; None: the likeliest tokens are the drafts.
        num_drafts: tokens proposed for a row.
        vocabulary: its tokens as the target's.
        mask_token_id: None: it makes one draft after the other.
        max_positions: the most tokens of a request that both models compute.
        max_num_tokens: in a step of the draft model.
    """

    reads = ForwardReads()
    sees_all_steps = True

    def __init__(
        self,
        draft: LoadedDraft,
        table: RequestTable,
        sampler: Sampler | None,
        *,
        num_drafts: int,
        vocabulary: DraftVocabulary,
        mask_token_id: int | None = None,
        max_positions: int,
        max_num_tokens: int,
    ) -> None:
        self._forward = draft.forward
        self._recorded = draft.recorded
        self._sampler = sampler
        self._decode_inputs = DecodeInputs(table, draft.recorded.choose_shape)
        # A recorded step of an accelerator reads the target's ids from the table by itself.
        self._may_record = table.device.type == "cpu" or isinstance(vocabulary, SameTokens)
        self._num_drafts = num_drafts
        self._vocabulary = vocabulary
        self._mask_token_id = mask_token_id
        self._max_positions = max_positions
        self._max_num_tokens = max_num_tokens
        self._computed = np.full(table.max_num_seqs, -1)  # leading tokens of each slot that it knows; -1: as the target
        self._rests = False
        self._may_rest = not draft.forward.forgets_tokens  # else pages of earlier tokens are others' by then

    @classmethod
    def reads_of(cls, config: EngineConfig) -> ForwardReads:
        return cls.reads

    @classmethod
    def check(cls, config: EngineConfig, target: Model, draft: Model | None) -> None:
        """Refuses draft models that do not know the target's tokens, or cannot take drafts back."""
        assert draft is not None, "the method reads a checkpoint"
        assert config.draft_model is not None
        spec, own = config.spec, config.draft_model.spec
        if own.vocab_size < spec.vocab_size and config.draft_model.vocabulary is None:
            raise ModelLoadError(
                f"The draft model {own.name} has {own.vocab_size} tokens, fewer than the {spec.vocab_size} of "
                f"{spec.name}: choose a draft model with the same tokenizer."
            )
        if draft.state_layers or any(layer.sees_prompt for layer in draft.kv_layers):
            raise ModelLoadError(
                f"The draft model {own.name} has layers that cannot take a draft back, recurrent ones or such as see a "
                "prompt's end: choose one with attention to earlier tokens alone."
            )

    @classmethod
    def build(cls, parts: MethodParts) -> "DraftModel":
        assert parts.draft is not None
        options, limits = parts.speculation, parts.config.limits
        lengths = (parts.max_model_len, parts.draft.spec.max_position_embeddings, options.max_model_len)
        assert parts.config.draft_model is not None
        shared = parts.config.draft_model.vocabulary
        same = SameTokens(parts.config.spec.vocab_size)
        return cls(
            parts.draft,
            parts.table,
            None if options.draft_sampling == "greedy" else parts.sampler,
            num_drafts=options.num_tokens,
            vocabulary=same if shared is None else TokensByText(shared, parts.table.device),
            mask_token_id=options.mask_token_id,
            max_positions=min(length for length in lengths if length is not None),
            max_num_tokens=limits.max_num_batched_tokens + limits.max_num_seqs,
        )

    def admit(self, request: NewSlot) -> None:
        """Begins where the target begins."""
        self._computed[request.slot] = -1

    def release(self, slots: list[int]) -> None:
        """Does nothing: all state is in pages."""

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        plan = forward.plan
        asked = sampled.rows[sampled.wants_drafts]
        slots, starts = np.asarray(plan.slots, np.int64), np.asarray(plan.num_computed, np.int64)
        ends = starts + np.asarray(plan.num_scheduled, np.int64)
        known = self._computed[slots]
        starts = np.where(known < 0, starts, np.minimum(known, starts))
        self._computed[slots] = starts
        if len(sampled.rows):
            self._rests = self._may_rest and not len(asked)
        if self._rests:
            return Proposal.none(table.device)
        ends[sampled.rows] = sampled.num_known.tolist()  # without rejected drafts, and with the newest token
        # Tokens that are given as embeddings have no ids, and positions may end before the target's.
        fits = (table.num_unnamed[slots] == 0) & (ends <= self._max_positions)
        num_tokens = np.where(fits, ends - starts, 0)
        before = np.cumsum(num_tokens) - num_tokens
        num_tokens = np.minimum(num_tokens, np.maximum(self._max_num_tokens - before, 0))
        self._computed[slots] += num_tokens
        is_complete = fits & (starts + num_tokens == ends)
        most = sampled.limit(self._num_drafts)
        counts = np.where(is_complete, np.minimum(most, self._max_positions - ends), 0)[asked]
        wanted = np.zeros(len(slots), np.int64)
        wanted[asked] = counts > 0
        drafts = torch.zeros(len(asked), most, dtype=torch.int64, device=table.device)
        runs = num_tokens > 0
        if self._mask_token_id is not None and counts.any():
            rows = _Rows(slots, starts, num_tokens, ends, asked)
            counts = self._draft_at_once(table, rows, counts, self._mask_token_id, drafts)
        elif runs.any():
            first = self._decode(table, slots[runs], starts[runs], num_tokens[runs], wanted[runs])
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
        for column in range(drafts.shape[1]):
            going = np.flatnonzero(counts > column)
            if not len(going):
                return
            if column:
                ones = np.ones(len(going), np.int64)
                token_ids = self._decode(table, slots[going], num_known[going] + column - 1, ones, ones)
            drafts[to_device(going, table.device), column] = token_ids
            table.write(slots[going], num_known[going] + column, token_ids)

    def _draft_at_once(
        self, table: RequestTable, rows: "_Rows", counts: np.ndarray, mask_token_id: int, drafts: torch.Tensor
    ) -> np.ndarray:
        """Writes drafts into `drafts` [num_asked, most]: `counts` of each row, or fewer where the step has no room for
        their masks. Returns their numbers.
        """
        masks = np.maximum(counts - 1, 0)
        masks = np.where(np.cumsum(masks) <= self._max_num_tokens - rows.num_tokens.sum(), masks, 0)
        counts = np.minimum(counts, masks + 1)
        slots, ends = rows.slots[rows.asked], rows.ends[rows.asked]
        whose = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = ends[whose] + columns
        is_masked = columns < masks[whose]
        mask_ids = torch.full((int(is_masked.sum()),), mask_token_id, device=table.device)
        table.write(slots[whose][is_masked], places[is_masked], mask_ids)
        num_tokens, wanted = rows.num_tokens.copy(), np.zeros(len(rows.slots), np.int64)
        num_tokens[rows.asked] += masks
        wanted[rows.asked] = counts
        runs = num_tokens > 0
        token_ids = self._decode(table, rows.slots[runs], rows.starts[runs], num_tokens[runs], wanted[runs])
        drafts[to_device(whose, table.device), to_device(columns, table.device)] = token_ids
        table.write(slots[whose], places, token_ids)
        return counts

    def _decode(
        self,
        table: RequestTable,
        slots: np.ndarray,
        starts: np.ndarray,
        num_tokens: np.ndarray,
        num_wanted: np.ndarray,
    ) -> torch.Tensor:
        """Computes the tokens of rows; returns those that follow the last ones of each, [sum of `num_wanted`] int64."""
        columns = (slots.tolist(), starts.tolist(), num_tokens.tolist(), num_wanted.tolist())
        plan = StepPlan(0, [], [], *columns, [])
        decode = self._decode_inputs.build(plan) if self._may_record else None
        batch = decode or build_input_batch(plan, table)
        self._vocabulary.translate(batch.token_ids)
        output = None if decode is None else self._recorded.run(decode)
        logits = self._forward.logits(batch) if output is None else output.logits
        logits = self._vocabulary.logits(without_padding(logits, batch))
        if self._sampler is None or not len(logits):
            return logits.argmax(-1)
        whose = np.repeat(np.arange(len(slots)), num_wanted)
        later = np.repeat(np.cumsum(num_wanted), num_wanted) - 1 - np.arange(len(whose))
        return self._sampler.draft(logits, SampleBatch(slots[whose], (starts + num_tokens)[whose] - later, table))


class _Rows(NamedTuple):
    """The rows of a step of the target.

    Attributes:
        slots: [num_rows] int64.
        starts: [num_rows] int64; the first token that the draft model lacks.
        num_tokens: [num_rows] int64; tokens that it computes.
        ends: [num_rows] int64; known tokens.
        asked: [num_asked] int64; rows that want drafts.
    """

    slots: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    ends: np.ndarray
    asked: np.ndarray

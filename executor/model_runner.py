"""Runs steps: a plan in, sampled tokens out. Owns the request table, the KV cache and the sampler of one rank."""

import numpy as np
import torch

from quire.core.protocol import StepPlan, StepResult
from quire.core.trace import NO_SPANS, Spans
from quire.executor.embedded_prompts import EmbeddedPrompts
from quire.executor.input_batch import InputBatch, build_input_batch
from quire.executor.models.base import GivenRows, Model, Wanted
from quire.executor.request_table import RequestTable
from quire.executor.sampling.feature import SampleBatch
from quire.executor.sampling.prompt_scorer import PromptScorer
from quire.executor.sampling.sampler import Sampled, Sampler
from quire.ops import AttentionBatch, Backend


class ModelRunner:
    """One rank's model and everything that a step touches. Ranks run the same plans and come to the same tokens."""

    def __init__(
        self,
        model: Model,
        ops: Backend,
        table: RequestTable,
        sampler: Sampler,
        scorer: PromptScorer,
        embedded: EmbeddedPrompts,
        kv_caches: list[torch.Tensor],
        spans: Spans = NO_SPANS,
    ) -> None:
        self._model = model
        self._ops = ops
        self._table = table
        self._sampler = sampler
        self._scorer = scorer
        self._embedded = embedded
        self._kv_caches = kv_caches
        self._spans = spans

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Applies the plan to the table, runs its rows and waits for the tokens."""
        with self._spans.span("inputs"):
            self._table.apply(plan)
            self._scorer.release(plan.released)
            self._sampler.grammar.release(plan.released)
            self._embedded.release(plan.released)
            for new in plan.admitted:
                self._sampler.admit(new)
                self._scorer.admit(new)
                self._embedded.admit(new)
            if not plan.slots:
                return StepResult(plan.step_id, [])
            batch = build_input_batch(plan, self._table)
            given = self._embedded.rows(plan) if self._embedded.pending else None
        with self._spans.span("forward"):
            hidden = self._forward(batch, given)
        result = StepResult(plan.step_id, [])
        if len(batch.sampled_slots):
            with self._spans.span("sample"):
                result = self._sample(plan.step_id, batch, hidden)
        if self._scorer.pending:
            with self._spans.span("score"):
                result.prompt_logprobs = self._scorer.score(plan, hidden, self._table, self._model.compute_logits)
        return result

    def _sample(self, step_id: int, batch: InputBatch, hidden: torch.Tensor) -> StepResult:
        by_row = hidden if len(hidden) == len(batch.query_lens) else hidden[batch.row_ends]
        logits = self._model.compute_logits(by_row[batch.sampled_rows])
        sampled = self._sampler.sample(logits, SampleBatch(batch.sampled_slots, batch.sampled_positions, self._table))
        # On the device, so that the next step can read the tokens whether or not the host has seen them.
        self._table.write(batch.sampled_slots, batch.sampled_positions, sampled.token_ids)
        with self._spans.span("result"):
            return self._result(step_id, batch.sampled_slots, sampled)

    def _forward(self, batch: InputBatch, given: GivenRows | None) -> torch.Tensor:
        """Hidden states of all tokens while prompts are scored, otherwise of each row's last one."""
        attention = self._attention_batch(batch, batch.query_lens, batch.slot_mapping)
        wanted = None
        if len(batch.token_ids) > len(batch.query_lens) and not self._scorer.pending:
            lasts = self._attention_batch(batch, np.ones_like(batch.query_lens), batch.slot_mapping[batch.row_ends])
            wanted = Wanted(batch.row_ends, lasts)
        return self._model.forward(batch.token_ids, batch.positions, self._kv_caches, attention, given, wanted)

    def _attention_batch(self, batch: InputBatch, query_lens: np.ndarray, slot_mapping: torch.Tensor) -> AttentionBatch:
        """Of the last `query_lens` tokens of each row."""
        return self._ops.attention_batch(
            query_lens, batch.seq_lens, batch.block_tables, slot_mapping, block_size=self._table.block_size
        )

    def _result(self, step_id: int, slots: np.ndarray, sampled: Sampled) -> StepResult:
        """Reads a step's tokens off the device."""
        token_ids = sampled.token_ids.tolist()
        usable = sampled.usable.cpu().numpy()
        logprobs = sampled.logprobs.rows() if sampled.logprobs is not None else []
        broken = self._sampler.grammar.advance(slots, token_ids, usable)
        if usable.all() and not broken:
            return StepResult(step_id, token_ids, logprobs)
        result = StepResult(step_id, token_ids, [entry for entry in logprobs if usable[entry[0]]])
        for row in np.flatnonzero(~usable).tolist():
            reason = self._sampler.why_nothing_fits(int(slots[row]))
            if reason is not None:
                result.refusals.append((row, reason))
            else:
                result.failures.append((row, "The model's logits were NaN or infinite for this request."))
        for row in broken:
            result.failures.append((row, "A logits processor brought back a token that the grammar forbids."))
        return result

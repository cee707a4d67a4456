"""Runs steps: a plan in, sampled tokens out. Owns the request table and the sampler of one rank."""

import numpy as np
import torch

from quire.core.trace import NO_SPANS, Spans
from quire.core.wire.protocol import StepPlan, StepResult
from quire.executor.sampling.feature import SampleBatch
from quire.executor.sampling.prompt_scorer import PromptScorer
from quire.executor.sampling.sampler import Sampled, Sampler
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch, build_input_batch
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.slot_state import SlotState


class ModelRunner:
    """One rank's model and everything that a step touches. Ranks run the same plans and come to the same tokens."""

    def __init__(
        self,
        forward: Forward,
        recorded_steps: RecordedSteps,
        table: RequestTable,
        sampler: Sampler,
        scorer: PromptScorer,
        embedded: EmbeddedPrompts,
        spans: Spans = NO_SPANS,
        decode_inputs: DecodeInputs | None = None,
    ) -> None:
        self._forward = forward
        self._recorded_steps = recorded_steps
        self._table = table
        self._decode_inputs = decode_inputs
        self._sampler = sampler
        self._scorer = scorer
        self._embedded = embedded
        self._spans = spans
        self._slot_states: list[SlotState] = [table, sampler, scorer, embedded]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Applies the plan to the table, runs its rows and waits for the tokens."""
        with self._spans.span("inputs"):
            self._apply(plan)
            if not plan.slots:
                return StepResult(plan.step_id, [])
            decode = None if self._decode_inputs is None else self._decode_inputs.build(plan)
            batch = build_input_batch(plan, self._table) if decode is None else decode
            given = self._embedded.rows(plan) if self._embedded.pending else None
        result = StepResult(plan.step_id, [])
        if self._scorer.pending:
            with self._spans.span("forward"):
                hidden = self._forward.hidden(batch, given)
            if len(batch.sampled_slots):
                with self._spans.span("sample"):
                    result = self._sample(plan.step_id, batch, self._forward.sampled_logits(hidden, batch))
            with self._spans.span("score"):
                result.prompt_logprobs = self._scorer.score(plan, hidden, self._table, self._forward.compute_logits)
            return result
        with self._spans.span("forward"):
            logits = None if decode is None or given is not None else self._recorded_steps.logits(decode)
            if logits is None:
                logits = self._forward.logits(batch, given)
        if len(batch.sampled_slots):
            with self._spans.span("sample"):
                result = self._sample(plan.step_id, batch, logits)
        return result

    def _apply(self, plan: StepPlan) -> None:
        """Makes the slots what `plan` says, in the plan's order: releases, admissions, new pages."""
        if plan.released or plan.admitted:
            for state in self._slot_states:
                state.release(plan.released)
                for request in plan.admitted:
                    state.admit(request)
        for slot, block_ids in plan.appended_blocks:
            self._table.append_blocks(slot, block_ids)

    def _sample(self, step_id: int, batch: InputBatch, logits: torch.Tensor) -> StepResult:
        # Copies: a logits processor may keep them, and the next step may have its own in the same place.
        sample_batch = SampleBatch(batch.sampled_slots.copy(), batch.sampled_positions.copy(), self._table)
        sampled = self._sampler.sample(logits, sample_batch)
        # On the device, so that the next step can read the tokens whether or not the host has seen them.
        self._table.write(batch.sampled_slots, batch.sampled_positions, sampled.token_ids)
        with self._spans.span("result"):
            return self._result(step_id, batch.sampled_slots, sampled)

    def _result(self, step_id: int, slots: np.ndarray, sampled: Sampled) -> StepResult:
        """Reads a step's tokens off the device."""
        token_ids = sampled.token_ids.tolist()
        usable = sampled.usable.tolist()
        rows = [[token_id] for token_id in token_ids]
        logprobs = [(row, [entry]) for row, entry in sampled.logprobs.rows()] if sampled.logprobs is not None else []
        broken = self._sampler.grammar.advance(slots, token_ids, usable)
        if all(usable) and not broken:
            return StepResult(step_id, rows, logprobs)
        result = StepResult(step_id, rows, [entry for entry in logprobs if usable[entry[0]]])
        for row, is_usable in enumerate(usable):
            if is_usable:
                continue
            reason = self._sampler.why_nothing_fits(int(slots[row]))
            if reason is not None:
                result.refusals.append((row, reason))
            else:
                result.failures.append((row, "The model's logits were NaN or infinite for this request."))
        for row in broken:
            result.failures.append((row, "A logits processor brought back a token that the grammar forbids."))
        return result

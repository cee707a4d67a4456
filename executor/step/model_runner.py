"""Runs steps: a plan in, sampled tokens out. Owns the request table and the sampler of one rank."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from quire.core.trace import NO_SPANS, Spans
from quire.core.wire.protocol import StepPlan, StepResult
from quire.executor.models.base import GivenRows
from quire.executor.sampling.feature import SampleBatch
from quire.executor.sampling.prompt_scorer import PromptScorer, ScoredPart
from quire.executor.sampling.sampler import Sampled, Sampler
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch, build_input_batch
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.slot_state import SlotState
from quire.executor.step.transfers import Transfers


class _Inputs(NamedTuple):
    batch: InputBatch
    given: GivenRows | None
    can_be_recorded: bool


class ModelRunner:
    """One rank's model and everything that a step touches. Ranks run the same plans and come to the same tokens.

    A step is launched, which tells the device what to do, and collected later, which reads what came of it. The next
    step may be launched in between: it finds the tokens of this one on the device.
    """

    def __init__(
        self,
        forward: Forward,
        recorded_steps: RecordedSteps,
        table: RequestTable,
        sampler: Sampler,
        scorer: PromptScorer,
        embedded: EmbeddedPrompts,
        transfers: Transfers,
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
        self._transfers = transfers
        self._spans = spans
        self._slot_states: list[SlotState] = [table, sampler, scorer, embedded]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Applies the plan to the slots and tells the device all that it has to do for the plan's rows.

        Nothing is read from the device, with one exception: see `Sampler`. Whatever ranks do together, they do here, so
        that they do it in the order of plans.
        """
        began = time.monotonic()
        sampled: Sampled | None = None
        scored: list[ScoredPart] = []
        with self._spans.span("inputs"):
            self._apply(plan)
            inputs = self._inputs(plan) if plan.slots else None
        if inputs is not None:
            if self._scorer.pending:
                sampled, scored = self._launch_scored(plan, inputs)
            else:
                sampled = self._launch_plain(inputs)
        return LaunchedStep(plan.step_id, began, sampled, scored, self._transfers.to_host(()))

    def collect(self, step: LaunchedStep) -> StepResult:
        """Reads what a step has brought, and waits for it if need be. Steps are collected in order."""
        with self._spans.span("result"):
            result = StepResult(step.step_id, [])
            if step.sampled is not None:
                self._read_tokens(step.sampled, result)
            result.prompt_logprobs = [part.read() for part in step.scored]
        self._spans.add("step", step.launched_at, time.monotonic())
        result.spans = self._spans.take()
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

    def _inputs(self, plan: StepPlan) -> _Inputs:
        decode = None if self._decode_inputs is None else self._decode_inputs.build(plan)
        given = self._embedded.rows(plan) if self._embedded.pending else None
        batch = build_input_batch(plan, self._table) if decode is None else decode
        return _Inputs(batch, given, can_be_recorded=decode is not None and given is None)

    def _launch_plain(self, inputs: _Inputs) -> Sampled | None:
        with self._spans.span("forward"):
            logits = self._recorded_steps.logits(inputs.batch) if inputs.can_be_recorded else None
            if logits is None:
                logits = self._forward.logits(inputs.batch, inputs.given)
        return self._sample(inputs.batch, lambda: logits)

    def _launch_scored(self, plan: StepPlan, inputs: _Inputs) -> tuple[Sampled | None, list[ScoredPart]]:
        """A step beside prompts whose tokens are scored: the hidden states of all tokens are needed."""
        with self._spans.span("forward"):
            hidden = self._forward.hidden(inputs.batch, inputs.given)
        sampled = self._sample(inputs.batch, lambda: self._forward.sampled_logits(hidden, inputs.batch))
        with self._spans.span("score"):
            return sampled, self._scorer.score(plan, hidden, self._table, self._forward.compute_logits)

    def _sample(self, batch: InputBatch, compute_logits: Callable[[], torch.Tensor]) -> Sampled | None:
        if not len(batch.sampled_slots):
            return None
        with self._spans.span("sample"):
            # Copies: a logits processor may keep them, and the next step may have its own in the same place.
            samples = SampleBatch(batch.sampled_slots.copy(), batch.sampled_positions.copy(), self._table)
            sampled = self._sampler.sample(compute_logits(), samples)
            # On the device, so that the next step can read the tokens whether or not the host has seen them.
            self._table.write(batch.sampled_slots, batch.sampled_positions, sampled.token_ids)
        return sampled

    def _read_tokens(self, sampled: Sampled, result: StepResult) -> None:
        self._sampler.collect(sampled)
        token_ids, usable = sampled.on_host
        result.token_ids = [[token_id] for token_id in token_ids]
        if sampled.logprobs is not None:
            result.logprobs = [(row, [entry]) for row, entry in sampled.logprobs.rows() if usable[row]]
        for row in [] if all(usable) else np.flatnonzero(~np.array(usable)).tolist():
            reason = self._sampler.why_unusable(sampled, row)
            if reason is not None:
                result.refusals.append((row, reason))
            else:
                result.failures.append((row, "The model's logits were NaN or infinite for this request."))
        for row in sampled.forbidden:
            result.failures.append((row, "A logits processor brought back a token that the grammar forbids."))

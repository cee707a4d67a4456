"""Runs steps: a plan in, sampled tokens out. Owns the request table and the sampler of one rank."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.core.trace import NO_SPANS, Spans
from quire.core.wire.protocol import StepPlan, StepResult
from quire.executor.models.base import GivenRows
from quire.executor.sampling.prompt_scorer import PromptScorer, ScoredPart
from quire.executor.step.decode_inputs import DecodeInputs
from quire.executor.step.embedded_prompts import EmbeddedPrompts
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch, build_input_batch
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.request_table import RequestTable
from quire.executor.step.row_sampler import RowSampler, SampledRows
from quire.executor.step.slot_state import SlotState
from quire.executor.step.state_snapshots import StateSnapshots
from quire.executor.transfers import Transfers


class _Inputs(NamedTuple):
    batch: InputBatch
    given: GivenRows | None
    can_be_recorded: bool


class ModelRunner:
    """One rank's model and everything that a step touches. Ranks run the same plans and come to the same tokens.

    `launch` queues a step's work on the device, and `collect` reads its result later. The next step may be launched in
    between: it finds the tokens of this one on the device.

    Args:
        slot_states: all objects that keep state of the requests in the slots.
        decode_inputs: None on an accelerator, where inputs are copied to the device and have no fixed place.
        snapshots: of the states of recurrent layers; None for a model without.
    """

    def __init__(
        self,
        forward: Forward,
        recorded_steps: RecordedSteps,
        table: RequestTable,
        rows: RowSampler,
        scorer: PromptScorer,
        embedded: EmbeddedPrompts,
        slot_states: Sequence[SlotState],
        transfers: Transfers,
        spans: Spans = NO_SPANS,
        decode_inputs: DecodeInputs | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._forward = forward
        self._recorded_steps = recorded_steps
        self._table = table
        self._decode_inputs = decode_inputs
        self._rows = rows
        self._scorer = scorer
        self._embedded = embedded
        self._transfers = transfers
        self._spans = spans
        self._slot_states = slot_states
        self._snapshots = snapshots

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Applies the plan to the slots and queues all work for the plan's rows on the device.

        Nothing is read from the device, with one exception: see `Sampler`. All collectives of ranks happen here, and so
        in the order of plans.
        """
        began = time.monotonic()
        rows: SampledRows | None = None
        scored: list[ScoredPart] = []
        with self._spans.span("inputs"):
            self._apply(plan)
            inputs = self._inputs(plan) if plan.slots else None
        if inputs is not None:
            if self._scorer.pending:
                rows, scored = self._launch_scored(plan, inputs)
            else:
                rows = self._launch_plain(inputs)
        if self._snapshots is not None:
            self._snapshots.take(plan)
        return LaunchedStep(plan.step_id, began, rows, scored, self._transfers.to_host(()))

    def collect(self, step: LaunchedStep) -> StepResult:
        """Reads the result of a step, and waits for it if need be. Steps are collected in order."""
        with self._spans.span("result"):
            result = StepResult(step.step_id, [])
            if step.rows is not None:
                self._rows.collect(step.rows, result)
            result.prompt_logprobs = [part.read() for part in step.scored]
        self._spans.add("step", step.launched_at, time.monotonic())
        result.spans = self._spans.take()
        return result

    def _apply(self, plan: StepPlan) -> None:
        """Applies the changes of `plan` to the slots, in this order: releases, admissions, new pages."""
        if self._snapshots is not None:
            self._snapshots.apply(plan)
        if plan.released or plan.admitted:
            for state in self._slot_states:
                state.release(plan.released)
                for request in plan.admitted:
                    state.admit(request)
        for slot, page_ids in plan.appended_pages:
            self._table.append_pages(slot, page_ids)

    def _inputs(self, plan: StepPlan) -> _Inputs:
        decode = None if self._decode_inputs is None else self._decode_inputs.build(plan)
        given = self._embedded.rows(plan) if self._embedded.pending else None
        batch = decode or build_input_batch(plan, self._table, has_states=self._snapshots is not None)
        return _Inputs(batch, given, can_be_recorded=decode is not None and given is None)

    def _launch_plain(self, inputs: _Inputs) -> SampledRows | None:
        with self._spans.span("forward"):
            logits = self._recorded_steps.logits(inputs.batch) if inputs.can_be_recorded else None
            if logits is None:
                logits = self._forward.logits(inputs.batch, inputs.given)
        if not len(inputs.batch.wanted_slots):
            return None
        with self._spans.span("sample"):
            return self._rows.launch(inputs.batch, logits)

    def _launch_scored(self, plan: StepPlan, inputs: _Inputs) -> tuple[SampledRows | None, list[ScoredPart]]:
        """Launches a step with prompts to be scored, which needs the hidden states of all tokens."""
        rows = None
        with self._spans.span("forward"):
            hidden = self._forward.hidden(inputs.batch, inputs.given)
        if len(inputs.batch.wanted_slots):
            with self._spans.span("sample"):
                rows = self._rows.launch(inputs.batch, self._forward.wanted_logits(hidden, inputs.batch))
        with self._spans.span("score"):
            return rows, self._scorer.score(plan, hidden, self._table, self._forward.compute_logits)

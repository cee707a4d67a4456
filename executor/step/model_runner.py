"""Runs steps: a plan in, sampled tokens out. Owns the sampler of one rank."""

import time

import torch

from quire.core.trace import NO_SPANS, Spans
from quire.core.wire.protocol import StepPlan, StepResult
from quire.executor.sampling.prompt_scorer import PromptScorer, ScoredPart
from quire.executor.step.forward import Forward
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.recorded_steps import RecordedSteps
from quire.executor.step.row_sampler import RowSampler, SampledRows
from quire.executor.step.step_inputs import Inputs, StepInputs
from quire.executor.transfers import Transfers


class ModelRunner:
    """One rank's model and all state that a step uses. Ranks run the same plans and get the same tokens.

    `launch` queues a step's work on the device, and `collect` reads its result later. The next step may be launched in
    between, because the tokens of this one are on the device.
    """

    def __init__(
        self,
        forward: Forward,
        recorded_steps: RecordedSteps,
        inputs: StepInputs,
        rows: RowSampler,
        scorer: PromptScorer,
        transfers: Transfers,
        spans: Spans = NO_SPANS,
    ) -> None:
        self._forward = forward
        self._recorded_steps = recorded_steps
        self._inputs = inputs
        self._rows = rows
        self._scorer = scorer
        self._transfers = transfers
        self._spans = spans

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
            inputs = self._inputs.build(plan)
        if inputs is not None:
            if self._scorer.pending:
                rows, scored = self._launch_scored(plan, inputs)
            else:
                rows = self._launch_plain(inputs)
        moved = self._inputs.finish(plan)
        return LaunchedStep(plan.step_id, began, rows, scored, moved, self._transfers.to_host(()))

    def collect(self, step: LaunchedStep) -> StepResult:
        """Reads the result of a step, waiting for it if necessary. Steps are collected in order."""
        with self._spans.span("result"):
            result = StepResult(step.step_id, [], moved=step.moved)
            if step.rows is not None:
                self._rows.collect(step.rows, result)
            result.prompt_logprobs = [part.read() for part in step.scored]
        self._spans.add("step", step.launched_at, time.monotonic())
        result.spans = self._spans.drain()
        return result

    def _launch_plain(self, inputs: Inputs) -> SampledRows | None:
        with self._spans.span("forward"):
            logits = self._recorded_steps.logits(inputs.batch) if inputs.can_be_recorded else None
            if logits is None:
                logits = self._forward.logits(inputs.batch, inputs.input_embeds)
        if not len(inputs.batch.wanted_slots):
            return None
        with self._spans.span("sample"):
            return self._rows.launch(inputs.batch, logits)

    def _launch_scored(self, plan: StepPlan, inputs: Inputs) -> tuple[SampledRows | None, list[ScoredPart]]:
        """Launches a step that scores prompts, which needs the hidden states of all tokens."""
        rows = None
        with self._spans.span("forward"):
            hidden = self._forward.hidden(inputs.batch, inputs.input_embeds)
        if len(inputs.batch.wanted_slots):
            with self._spans.span("sample"):
                rows = self._rows.launch(inputs.batch, self._forward.wanted_logits(hidden, inputs.batch))
        with self._spans.span("score"):
            return rows, self._scorer.score(plan, hidden, self._inputs.table, self._forward.compute_logits)

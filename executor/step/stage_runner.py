"""Runs the steps of a pipeline stage before the last: a plan in, and hidden states out, to the next stage."""

import time

import torch

from quire.core.trace import NO_SPANS, Spans
from quire.core.wire.protocol import StepPlan, StepResult
from quire.executor.step.forward import Forward
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.step_inputs import StepInputs
from quire.executor.transfers import Transfers


class StageRunner:
    """Replaces `ModelRunner` in earlier stages. It samples nothing: the last stage does, and the engine sends the
    tokens in later plans.
    """

    def __init__(self, forward: Forward, inputs: StepInputs, transfers: Transfers, spans: Spans = NO_SPANS) -> None:
        self._forward = forward
        self._inputs = inputs
        self._transfers = transfers
        self._spans = spans

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Applies the plan to the slots, and queues the work for its rows; the result goes to the next stage."""
        began = time.monotonic()
        with self._spans.span("inputs"):
            inputs = self._inputs.build(plan)
        if inputs is not None:
            with self._spans.span("forward"):
                self._forward.hand_over(inputs.batch, inputs.input_embeds)
        moved = self._inputs.finish(plan)
        return LaunchedStep(plan.step_id, began, None, [], moved, self._transfers.to_host(()))

    def collect(self, step: LaunchedStep) -> StepResult:
        """Returns a result without tokens."""
        self._spans.add("step", step.launched_at, time.monotonic())
        return StepResult(step.step_id, [], spans=self._spans.drain(), moved=step.moved)

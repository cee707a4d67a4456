"""Runs steps: a plan in, sampled tokens and other outputs of its rows out. Owns the heads of one rank."""

import time
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from quire.core.trace import NO_SPANS, Spans
from quire.core.wire.protocol import StepPlan, StepResult
from quire.core.wire.row_outputs import OutputKind
from quire.executor.models.base import LayerTaps
from quire.executor.step.forward import Forward
from quire.executor.step.heads.head import Head, HeadRow, Heads, PendingOutput, rows_by_kind
from quire.executor.step.input_batch import without_padding
from quire.executor.step.launched_step import LaunchedStep
from quire.executor.step.recorded_sequences import RecordedSequences
from quire.executor.step.recorded_steps import RecordedSteps, StepOutput
from quire.executor.step.row_sampler import RowSampler, SampledRows
from quire.executor.step.short_memory import NO_MEMORY, StepInParts
from quire.executor.step.speculator import ForwardPass, ForwardReads
from quire.executor.step.state_rewind import StateRewind
from quire.executor.step.step_inputs import Inputs, StepInputs
from quire.executor.transfers import Transfers


class ModelRunner:
    """One rank's model and all state that a step uses. Ranks run the same plans and get the same tokens.

    `launch` queues a step's work on the device, and `collect` reads its result later. The next step may be launched in
    between, because the tokens of this one are on the device.

    Args:
        parts: computes a step for which there is too little memory; None: such a step ends the engine.
        sequences: an encoder's short steps; None for models with a cache.
    """

    def __init__(
        self,
        forward: Forward,
        recorded_steps: RecordedSteps,
        inputs: StepInputs,
        rows: RowSampler,
        heads: Heads,
        transfers: Transfers,
        spans: Spans = NO_SPANS,
        reads: ForwardReads = ForwardReads(),
        rewind: StateRewind | None = None,
        parts: StepInParts | None = None,
        sequences: RecordedSequences | None = None,
    ) -> None:
        self._forward = forward
        self._recorded_steps = recorded_steps
        self._inputs = inputs
        self._rows = rows
        self._heads = heads
        self._transfers = transfers
        self._spans = spans
        self._reads = reads
        self._rewind = rewind
        self._parts = parts
        self._sequences = sequences

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Applies the plan to the slots and queues all work for the plan's rows on the device.

        Nothing is read from the device, with few exceptions: see `Sampler`, `Speculator` and `StateRewind`. All
        collectives of ranks happen here, and so in the order of plans.
        """
        began = time.monotonic()
        rows: SampledRows | None = None
        outputs: list[PendingOutput] = []
        failed: set[int] = set()
        with self._spans.span("inputs"):
            inputs = self._inputs.build(plan)
        if inputs is not None:
            if inputs.to_encode is not None:
                with self._spans.span("encode"):
                    self._forward.encode(inputs.to_encode)
            saved = None if self._rewind is None else self._rewind.save(plan)
            if plan.outputs or self._reads.needs_hidden:
                rows, outputs, failed = self._launch_heads(plan, inputs)
            else:
                rows, failed = self._launch_plain(plan, inputs)
            if self._rewind is not None and saved is not None and rows is not None:
                self._rewind.settle(plan, saved, rows.num_tokens())
        moved = self._inputs.finish(plan)
        return LaunchedStep(plan.step_id, began, rows, outputs, moved, self._transfers.to_host(()), failed)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Reads the result of a step, waiting for it if necessary. Steps are collected in order."""
        with self._spans.span("result"):
            result = StepResult(step.step_id, [], moved=step.moved)
            if step.rows is not None:
                self._rows.collect(step.rows, result)
            result.outputs += [(output.row, output.read()) for output in step.outputs]
            if step.failed:
                kept = [(row, output) for row, output in result.outputs if row not in step.failed]
                result.outputs = kept + [(row, NO_MEMORY) for row in sorted(step.failed)]
        self._spans.add("step", step.launched_at, time.monotonic())
        result.spans = self._spans.drain()
        return result

    def _launch_plain(self, plan: StepPlan, inputs: Inputs) -> tuple[SampledRows | None, set[int]]:
        with self._spans.span("forward"):
            output, failed = self._compute_logits(plan, inputs)

        def compute_again() -> torch.Tensor:
            nonlocal failed
            is_plain = _is_plain(inputs)
            if output.logits.dtype != torch.float32 and not is_plain:
                return output.logits  # masked in place, at most: only raw log-probabilities would see it
            assert self._parts is not None
            logits, more = self._parts.logits(plan, is_plain=is_plain)
            failed |= more
            return logits

        forward = ForwardPass(plan, inputs.batch, output.logits, tokens=output.tokens)
        return self._sample(forward, compute_again), failed

    def _compute_logits(self, plan: StepPlan, inputs: Inputs) -> tuple[StepOutput, set[int]]:
        """Returns the output for the wanted tokens, and the rows of the plan for which there is no memory."""
        try:
            output = self._recorded_steps.run(inputs.batch) if inputs.can_be_recorded else None
            if output is None:
                output = StepOutput(self._forward.logits(inputs.batch, inputs.input_embeds))
            return output._replace(logits=without_padding(output.logits, inputs.batch)), set()
        except torch.OutOfMemoryError:
            if self._parts is None:
                raise
        self._parts.release()  # not before: the error holds the step's memory
        logits, failed = self._parts.logits(plan, is_plain=_is_plain(inputs))
        return StepOutput(logits), failed

    def _launch_heads(self, plan: StepPlan, inputs: Inputs) -> tuple[SampledRows | None, list[PendingOutput], set[int]]:
        """Launches a step in which heads or the speculator read the hidden states of all tokens."""
        batch, layers = inputs.batch, self._reads.layers
        with self._spans.span("forward"):
            taps = LayerTaps(layers) if layers else None
            padded, failed = self._compute_hidden(plan, inputs, taps)
            logits = self._forward.wanted_logits(padded, batch) if len(batch.wanted_slots) else padded[:0]
        hidden, outputs_of = without_padding(padded, batch), {} if taps is None else taps.outputs
        seen = {layer: without_padding(output, batch) for layer, output in outputs_of.items()}
        forward = ForwardPass(plan, batch, without_padding(logits, batch), hidden, seen)
        rows = self._sample(forward, lambda: without_padding(self._forward.wanted_logits(padded, batch), batch))
        outputs: list[PendingOutput] = []
        for kind, wanting in rows_by_kind(plan, hidden).items():
            with self._spans.span("score"):
                # Scores of prompts need memory for logits, each for its own; vectors of rows go together.
                parts = [[row] for row in wanting] if kind is OutputKind.PROMPT_LOGPROBS else [wanting]
                for part in parts:
                    own = self._launch_head(self._heads[kind], part)
                    outputs += own or []
                    failed |= {row.row for row in part} if own is None else set()
        return rows, [output for output in outputs if output.row not in failed], failed

    def _launch_head(self, head: Head, rows: list[HeadRow]) -> list[PendingOutput] | None:
        """Returns the outputs of rows that have one already; None if there is no memory for them."""
        try:
            return head.launch(rows, self._inputs.table)
        except torch.OutOfMemoryError:
            if self._parts is None:
                raise
        self._parts.release()
        return None

    def _compute_hidden(self, plan: StepPlan, inputs: Inputs, taps: LayerTaps | None) -> tuple[torch.Tensor, set[int]]:
        """Returns the hidden states of all tokens, and the rows of the plan for which there is no memory."""
        try:
            hidden = None
            if self._sequences is not None and inputs.input_embeds is None:
                hidden = self._sequences.hidden(inputs.batch)
            if hidden is None:
                hidden = self._forward.hidden(inputs.batch, inputs.input_embeds, taps)
            return hidden, set()
        except torch.OutOfMemoryError:
            if self._parts is None or taps is not None:
                raise
        self._parts.release()
        values, failed = self._parts.hidden(plan, is_plain=_is_plain(inputs))
        return pad(values, (0, 0, 0, len(inputs.batch.token_ids) - len(values))), failed

    def _sample(self, forward: ForwardPass, compute_again: Callable[[], torch.Tensor]) -> SampledRows | None:
        with self._spans.span("sample"):
            return self._rows.launch(forward, compute_again)


def _is_plain(inputs: Inputs) -> bool:
    """Returns True if token ids and positions are all that a step reads, and its rows may be cut anywhere."""
    batch = inputs.batch
    is_whole = batch.prefix_spans is not None or bool(batch.cross) or batch.is_shifted
    return not is_whole and inputs.input_embeds is None and batch.token_types is None

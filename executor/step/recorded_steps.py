"""Runs decode steps from recordings: a step of a known shape is one call instead of ten a layer.

Only its shape, whether a row has an adapter, and how tokens are chosen determine a decode step's kernels; everything
else is read from memory. The inputs of decode steps of one shape are always in the same place (`decode_inputs.py`), so
a recording computes logits, and on accelerators chooses tokens, from the current inputs. Steps with prompts hardly ever
repeat a shape, and take so long that Python's share is negligible.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.core.config.graphs import GraphConfig
from quire.executor.recordings import MAX_RECORDINGS, round_up, rules_for
from quire.executor.sampling.recorded_sampler import Choice, ChosenTokens, RecordedSampler
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch, StepShape
from quire.ops.backend import Backend
from quire.ops.recording import Recording


class StepOutput(NamedTuple):
    """What a step computed, padding included, valid until the next step; the caller may change the logits.

    Attributes:
        logits: [num_rows, vocab_size].
        tokens: the tokens that the step has chosen and written to the request table; None: none yet.
    """

    logits: torch.Tensor
    tokens: ChosenTokens | None = None


class _Key(NamedTuple):
    """What determines the operations of a step; `variant` is that of `Forward.variant`."""

    shape: StepShape
    variant: int
    choice: Choice | None


class _Recorded(NamedTuple):
    recording: Recording
    logits: torch.Tensor


class RecordedSteps:
    """The decode steps of one model that a backend can record. With `enabled` False, none is recorded.

    Args:
        max_seq_len: of all sequences.
        graphs: the user's choice of steps, where recordings are CUDA graphs.
        is_paused: called at each step; while it returns True, no recording is made or used.
        sampler: chooses tokens inside of recordings; None: they have logits alone.
    """

    def __init__(
        self,
        forward: Forward,
        ops: Backend,
        max_seq_len: int,
        *,
        graphs: GraphConfig = GraphConfig(),
        enabled: bool = True,
        is_paused: Callable[[], bool] = lambda: False,
        sampler: RecordedSampler | None = None,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._max_seq_len = max_seq_len
        self._rules = rules_for(ops.recording_rules, graphs)
        self._enabled = enabled and graphs.is_enabled
        self._is_paused = is_paused
        self._sampler = sampler
        self._table_memory: torch.Tensor | None = None  # from which recordings read tokens
        self._steps_since = self._rules.interval  # the last recording was made
        self._records_adapters = True
        self._seen: OrderedDict[_Key, _Recorded | None] = OrderedDict()  # None: seen once, not recorded

    def choose_shape(self, num_rows: int, longest: int) -> StepShape:
        """Returns the shape of a step with `num_rows` rows, the longest of `longest` tokens."""
        if not self._enabled:
            return StepShape(num_rows, self._max_seq_len)
        max_seq_len = round_up(longest, self._rules.max_seq_lens, self._max_seq_len)
        return StepShape(round_up(num_rows, self._rules.row_counts, num_rows), min(max_seq_len, self._max_seq_len))

    def run(self, batch: InputBatch) -> StepOutput | None:
        """Runs a batch of `DecodeInputs`, from a recording if there is one; None if it cannot be recorded."""
        if not self._enabled or self._is_paused():
            return None
        assert batch.shape is not None
        if self._rules.max_rows is not None and batch.shape.num_rows > self._rules.max_rows:
            return None
        variant = self._forward.variant(batch)
        if variant and not self._records_adapters:
            return None
        self._forget_other_memory(batch)
        chosen = None if self._sampler is None else batch.chosen
        key = _Key(batch.shape, variant, None if chosen is None else chosen.choice)
        self._steps_since += 1
        recorded = self._seen.get(key)
        if recorded is not None:
            self._seen.move_to_end(key)
            recorded.recording.run()
            return StepOutput(recorded.logits, self._tokens(key))
        if key in self._seen and self._steps_since >= self._rules.interval:
            return self._record(key, batch)
        self._seen.setdefault(key)
        self._drop_oldest()
        return self._run_unrecorded(key, batch)

    def _run_unrecorded(self, key: _Key, batch: InputBatch) -> StepOutput:
        """Runs a step's operations one by one, but for those that a recording without chosen tokens has."""
        recorded = self._seen.get(key._replace(choice=None))
        if recorded is None:
            logits = self._forward.logits(batch)
        else:
            recorded.recording.run()
            logits = recorded.logits
        if key.choice is None or not self._choose(logits, batch):
            return StepOutput(logits)
        return StepOutput(logits, self._tokens(key))

    def _record(self, key: _Key, batch: InputBatch) -> StepOutput:
        def run() -> torch.Tensor:
            logits = self._forward.logits(batch)
            if key.choice is not None:
                self._choose(logits, batch)
            return logits

        logits, recording = self._ops.record(run)
        output = StepOutput(logits, self._tokens(key))
        self._steps_since = 0
        if recording is not None:
            self._remember(key, _Recorded(recording, logits))
        elif key.variant:
            self._records_adapters = False  # other steps may still be recorded
        elif key.choice is not None:
            self._sampler = None  # perhaps without chosen tokens
        else:
            self._enabled = False
        return output

    def _choose(self, logits: torch.Tensor, batch: InputBatch) -> bool:
        """Chooses the tokens of rows, or returns False and leaves them, from now on, to the sampler outside."""
        assert self._sampler is not None
        assert batch.chosen is not None
        if self._sampler.choose(logits, batch.chosen):
            return True
        self._sampler = None
        return False

    def _tokens(self, key: _Key) -> ChosenTokens | None:
        if key.choice is None or self._sampler is None:
            return None
        return self._sampler.tokens(key.shape.num_rows, key.choice)

    def _forget_other_memory(self, batch: InputBatch) -> None:
        """Drops all recordings if the request table, from which they read, has grown out of its memory."""
        if batch.unread is not None and batch.unread.memory is not self._table_memory:
            self._table_memory = batch.unread.memory
            self._seen.clear()

    def _remember(self, key: _Key, recorded: _Recorded) -> None:
        self._seen[key] = recorded
        self._seen.move_to_end(key)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)

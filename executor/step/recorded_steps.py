"""Runs decode steps from recordings: a step of a known shape is one call instead of ten a layer.

Only its shape, and whether a row has an adapter, determine a decode step's kernels; everything else is read from
memory. The inputs of decode steps of one shape are always in the same place (`decode_inputs.py`), so a recording
computes logits from the current inputs. Steps with prompts hardly ever repeat a shape, and take so long that Python's
share is negligible.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.core.config.graphs import GraphConfig
from quire.executor.recordings import MAX_RECORDINGS, round_up, rules_for
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch, StepShape
from quire.ops.backend import Backend
from quire.ops.recording import Recording


class _Recorded(NamedTuple):
    recording: Recording
    logits: torch.Tensor


class RecordedSteps:
    """The decode steps of one model that a backend can record. With `enabled` False, none is recorded.

    Args:
        max_seq_len: of all sequences.
        graphs: the user's choice of steps, where recordings are CUDA graphs.
        can_pad: a step may have rows of padding.
        is_paused: called at each step; while it returns True, no recording is made or used.
    """

    def __init__(
        self,
        forward: Forward,
        ops: Backend,
        max_seq_len: int,
        *,
        graphs: GraphConfig = GraphConfig(),
        enabled: bool = True,
        can_pad: bool = True,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._max_seq_len = max_seq_len
        self._rules = rules_for(ops.recording_rules, graphs)
        self._enabled = enabled and graphs.is_enabled
        self._can_pad = can_pad
        self._is_paused = is_paused
        self._steps_since = self._rules.interval  # the last recording was made
        self._records_adapters = True
        # By shape and `Forward.variant`; None: seen once, not recorded.
        self._seen: OrderedDict[tuple[StepShape, int], _Recorded | None] = OrderedDict()

    def choose_shape(self, num_rows: int, longest: int) -> StepShape:
        """Returns the shape of a step with `num_rows` rows, the longest of `longest` tokens."""
        if not self._enabled:
            return StepShape(num_rows, self._max_seq_len)
        row_counts = self._rules.row_counts if self._can_pad else ()
        max_seq_len = round_up(longest, self._rules.max_seq_lens, self._max_seq_len)
        return StepShape(round_up(num_rows, row_counts, num_rows), min(max_seq_len, self._max_seq_len))

    def logits(self, batch: InputBatch) -> torch.Tensor | None:
        """Returns [num_rows, vocab_size] for a batch of `DecodeInputs`, padding included, valid until the next call;
        the caller may change it.

        None if the step has to run without a recording.
        """
        if not self._enabled or self._is_paused():
            return None
        assert batch.shape is not None
        if self._rules.max_rows is not None and batch.shape.num_rows > self._rules.max_rows:
            return None
        variant = self._forward.variant(batch)
        if variant and not self._records_adapters:
            return None
        key = batch.shape, variant
        self._steps_since += 1
        if key not in self._seen:
            self._remember(key, None)
            return None
        recorded = self._seen[key]
        if recorded is None:
            return self._record(key, batch) if self._steps_since >= self._rules.interval else None
        self._seen.move_to_end(key)
        recorded.recording.run()
        return recorded.logits

    def _record(self, key: tuple[StepShape, int], batch: InputBatch) -> torch.Tensor:
        logits, recording = self._ops.record(lambda: self._forward.logits(batch))
        self._steps_since = 0
        if recording is not None:
            self._remember(key, _Recorded(recording, logits))
        elif key[1]:
            self._records_adapters = False  # other steps may still be recorded
        else:
            self._enabled = False
        return logits

    def _remember(self, key: tuple[StepShape, int], recorded: _Recorded | None) -> None:
        self._seen[key] = recorded
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)

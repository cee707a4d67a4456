"""Runs decode steps from recordings: a step of a known shape is one call instead of ten a layer.

Only the number of requests determines a decode step's kernels; everything else is read from memory. The inputs of
decode steps are always in the same place (`decode_inputs.py`), so a recording computes logits from the current inputs.
Steps with prompts hardly ever repeat a shape, and take so long that Python's share is negligible.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch
from quire.ops.backend import Backend, Recording

MAX_RECORDINGS = 128
"""The most recordings, of the shapes used last. One takes about 100 kB for a model with 28 layers."""


class _Recorded(NamedTuple):
    recording: Recording
    logits: torch.Tensor


class RecordedSteps:
    """The decode steps of one model that a backend can record. With `enabled` False, none is recorded.

    Args:
        is_paused: called at each step; while it returns True, no recording is made or used.
    """

    def __init__(
        self, forward: Forward, ops: Backend, *, enabled: bool = True, is_paused: Callable[[], bool] = lambda: False
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._enabled = enabled
        self._is_paused = is_paused
        self._seen: OrderedDict[int, _Recorded | None] = OrderedDict()  # by rows; None: seen once, not recorded

    def logits(self, batch: InputBatch) -> torch.Tensor | None:
        """Returns [num_rows, vocab_size] for a batch of `DecodeInputs`, valid until the next call; the caller may
        change it.

        None if the step has to run without a recording.
        """
        num_rows = len(batch.query_lens)
        if not self._enabled or self._is_paused():
            return None
        if num_rows not in self._seen:
            self._remember(num_rows, None)
            return None
        recorded = self._seen[num_rows]
        if recorded is None:
            return self._record(batch)
        self._seen.move_to_end(num_rows)
        recorded.recording.run()
        return recorded.logits

    def _record(self, batch: InputBatch) -> torch.Tensor:
        logits, recording = self._ops.record(lambda: self._forward.logits(batch))
        if recording is None:
            self._enabled = False
        else:
            self._remember(len(batch.query_lens), _Recorded(recording, logits))
        return logits

    def _remember(self, num_rows: int, recorded: _Recorded | None) -> None:
        self._seen[num_rows] = recorded
        self._seen.move_to_end(num_rows)
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)

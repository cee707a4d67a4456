"""Runs an encoder's short steps from recordings: sequences of lengths seen before are one call, not seven a layer.

Queries of search are short, and their lengths recur. In a step of few tokens Python takes as long as the kernels.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.executor.recordings import MAX_RECORDINGS
from quire.executor.step.forward import Forward
from quire.executor.step.input_batch import InputBatch
from quire.ops.backend import Backend
from quire.ops.recording import Recording

MAX_TOKENS = 128
"""Steps of more tokens are not recorded: the kernels take so long that Python's share is negligible."""


class _Recorded(NamedTuple):
    """A recording, the batch that it reads, and the hidden states that it writes."""

    recording: Recording
    batch: InputBatch
    hidden: torch.Tensor

    def fill(self, batch: InputBatch) -> None:
        """Copies the tokens of a `batch` of the same lengths to where the recording reads them."""
        assert self.batch.token_types is not None
        self.batch.token_ids.copy_(batch.token_ids)
        if batch.token_types is None:
            self.batch.token_types.zero_()
        else:
            self.batch.token_types.copy_(batch.token_types)


class RecordedSequences:
    """The short steps of one encoder that a backend can record. With `enabled` False, none is recorded.

    Lengths determine a step's kernels and its inputs but the token ids and segments, which are copied to where the
    recording reads them.

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
        self._seen: OrderedDict[tuple[int, ...], _Recorded | None] = OrderedDict()  # by lengths; None: seen once

    def hidden(self, batch: InputBatch) -> torch.Tensor | None:
        """Returns hidden states of all tokens, [num_tokens, hidden]; None if the step has to run without a recording.

        `batch` is of whole sequences.
        """
        if not self._enabled or len(batch.token_ids) > MAX_TOKENS or self._is_paused():
            return None
        lengths = tuple(batch.query_lens.tolist())
        if lengths not in self._seen:
            self._remember(lengths, None)
            return None
        recorded = self._seen[lengths]
        if recorded is None:
            return self._record(lengths, batch)
        self._seen.move_to_end(lengths)
        recorded.fill(batch)
        recorded.recording.run()
        return recorded.hidden.clone()  # the next recording that runs writes there

    def _record(self, lengths: tuple[int, ...], batch: InputBatch) -> torch.Tensor:
        types = torch.zeros_like(batch.token_ids) if batch.token_types is None else batch.token_types.clone()
        batch = dataclasses.replace(batch, token_ids=batch.token_ids.clone(), token_types=types)
        hidden, recording = self._ops.record(lambda: self._forward.hidden(batch))
        if recording is None:
            self._enabled = False
            return hidden
        self._remember(lengths, _Recorded(recording, batch, hidden))
        return hidden.clone()

    def _remember(self, lengths: tuple[int, ...], recorded: _Recorded | None) -> None:
        self._seen[lengths] = recorded
        self._seen.move_to_end(lengths)
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)

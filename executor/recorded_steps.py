"""Decode steps from recordings: a step of a shape seen before is one call, not ten a layer.

What a step of one token a request computes is decided by its number of requests and of samples; all else is read from
memory. So the inputs of such steps are put where they always are, and what the backend recorded of a shape computes
logits from whatever is there. Steps with more of a prompt hardly ever have a shape that was seen before, and take so
long that Python does not show in them.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

from quire.executor.forward import Forward
from quire.executor.input_batch import InputBatch
from quire.ops import Backend, Recording

MAX_ROWS = 512
MAX_RECORDINGS = 128
"""The shapes used last are kept: of a model with 28 layers, a recording takes about 100 kB."""


class _Shape(NamedTuple):
    num_rows: int
    num_sampled: int


class _Recorded(NamedTuple):
    inputs: InputBatch
    recording: Recording
    logits: torch.Tensor


class RecordedSteps:
    """The steps of one model, as far as a backend can record them.

    Args:
        max_num_seqs: rows of a step at most.
        num_pages: columns of a block table.
        enabled: False says no to every step.
    """

    def __init__(
        self,
        forward: Forward,
        ops: Backend,
        *,
        max_num_seqs: int,
        num_pages: int,
        device: torch.device,
        enabled: bool = True,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._enabled = enabled
        self._seen: OrderedDict[_Shape, _Recorded | None] = OrderedDict()  # None: once, and not recorded
        rows = min(max_num_seqs, MAX_ROWS)
        tokens = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self._inputs = InputBatch(
            token_ids=tokens[0],
            positions=tokens[1],
            slot_mapping=tokens[2],
            query_lens=np.ones(rows, np.int64),
            seq_lens=np.ones(rows, np.int64),
            block_tables=np.zeros((rows, num_pages), np.int32),
            row_ends=torch.arange(rows, device=device),
            sampled_rows=tokens[3],
            sampled_slots=np.zeros(rows, np.int64),
            sampled_positions=np.zeros(rows, np.int64),
        )

    def logits(self, batch: InputBatch) -> torch.Tensor | None:
        """[num_sampled, vocab_size] of a step, valid until the next call and free to be changed.

        None if the step is to be computed in the ordinary way.
        """
        shape = _Shape(len(batch.query_lens), len(batch.sampled_rows))
        is_decode = len(batch.token_ids) == shape.num_rows <= MAX_ROWS and shape.num_sampled
        if not self._enabled or not is_decode:
            return None
        if shape not in self._seen:
            self._remember(shape, None)
            return None
        recorded = self._seen[shape]
        if recorded is None:
            return self._record(batch, shape)
        self._seen.move_to_end(shape)
        _fill(recorded.inputs, batch)
        recorded.recording.run()
        return recorded.logits

    def _record(self, batch: InputBatch, shape: _Shape) -> torch.Tensor:
        inputs = self._inputs_of(shape)
        _fill(inputs, batch)
        logits, recording = self._ops.record(lambda: self._forward.logits(inputs))
        if recording is None:
            self._enabled = False
        else:
            self._remember(shape, _Recorded(inputs, recording, logits))
        return logits

    def _inputs_of(self, shape: _Shape) -> InputBatch:
        """Where a step of this shape has its inputs."""
        inputs, (rows, sampled) = self._inputs, shape
        return InputBatch(
            token_ids=inputs.token_ids[:rows],
            positions=inputs.positions[:rows],
            slot_mapping=inputs.slot_mapping[:rows],
            query_lens=inputs.query_lens[:rows],
            seq_lens=inputs.seq_lens[:rows],
            block_tables=inputs.block_tables[:rows],
            row_ends=inputs.row_ends[:rows],
            sampled_rows=inputs.sampled_rows[:sampled],
            sampled_slots=inputs.sampled_slots[:sampled],
            sampled_positions=inputs.sampled_positions[:sampled],
        )

    def _remember(self, shape: _Shape, recorded: _Recorded | None) -> None:
        self._seen[shape] = recorded
        self._seen.move_to_end(shape)
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)


def _fill(inputs: InputBatch, batch: InputBatch) -> None:
    inputs.token_ids.copy_(batch.token_ids)
    inputs.positions.copy_(batch.positions)
    inputs.slot_mapping.copy_(batch.slot_mapping)
    inputs.query_lens[:] = batch.query_lens
    inputs.seq_lens[:] = batch.seq_lens
    inputs.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
    if len(inputs.query_lens) > len(inputs.sampled_rows):  # else all rows sample
        inputs.sampled_rows.copy_(batch.sampled_rows)

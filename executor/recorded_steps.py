"""Small steps from recordings: a step of a shape seen before is one call, not ten a layer.

What a step computes is decided by its number of tokens, of requests and of samples; all else is read from memory. So
the inputs of small steps are put where they always are, and what the backend recorded of a shape computes logits from
whatever is there. Larger steps than a server's on a CPU take so long that Python does not show in them.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

from quire.executor.forward import Forward
from quire.executor.input_batch import InputBatch
from quire.ops import Backend, Recording

MAX_TOKENS = 512
MAX_RECORDINGS = 128
"""The shapes used last are kept: of a model with 28 layers, a recording takes about 100 kB."""


class _Shape(NamedTuple):
    num_tokens: int
    num_rows: int
    num_sampled: int


class _Recorded(NamedTuple):
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
        rows = min(max_num_seqs, MAX_TOKENS)
        tokens = torch.zeros(5, MAX_TOKENS, dtype=torch.int64, device=device)
        self._inputs = InputBatch(
            token_ids=tokens[0],
            positions=tokens[1],
            slot_mapping=tokens[2],
            query_lens=np.ones(rows, np.int64),
            seq_lens=np.ones(rows, np.int64),
            block_tables=np.zeros((rows, num_pages), np.int32),
            row_ends=tokens[3],
            sampled_rows=tokens[4],
            sampled_slots=np.zeros(rows, np.int64),
            sampled_positions=np.zeros(rows, np.int64),
        )

    def logits(self, batch: InputBatch) -> torch.Tensor | None:
        """[num_sampled, vocab_size] of a step, valid until the next call and free to be changed.

        None if the step is to be computed in the ordinary way.
        """
        shape = _Shape(len(batch.token_ids), len(batch.query_lens), len(batch.sampled_rows))
        if not self._enabled or shape.num_tokens > MAX_TOKENS or not shape.num_sampled:
            return None
        if shape not in self._seen:  # most shapes with a prompt in them do not come again
            self._remember(shape, None)
            return None
        self._fill(batch, shape)
        recorded = self._seen[shape]
        if recorded is None:
            return self._record(shape)
        self._seen.move_to_end(shape)
        recorded.recording.run()
        return recorded.logits

    def _fill(self, batch: InputBatch, shape: _Shape) -> None:
        inputs, (tokens, rows, sampled) = self._inputs, shape
        inputs.token_ids[:tokens] = batch.token_ids
        inputs.positions[:tokens] = batch.positions
        inputs.slot_mapping[:tokens] = batch.slot_mapping
        inputs.query_lens[:rows] = batch.query_lens
        inputs.seq_lens[:rows] = batch.seq_lens
        inputs.block_tables[:rows, : batch.block_tables.shape[1]] = batch.block_tables
        if tokens > rows:
            inputs.row_ends[:rows] = batch.row_ends
        if rows > sampled:
            inputs.sampled_rows[:sampled] = batch.sampled_rows

    def _record(self, shape: _Shape) -> torch.Tensor:
        inputs, (tokens, rows, sampled) = self._inputs, shape
        batch = InputBatch(
            token_ids=inputs.token_ids[:tokens],
            positions=inputs.positions[:tokens],
            slot_mapping=inputs.slot_mapping[:tokens],
            query_lens=inputs.query_lens[:rows],
            seq_lens=inputs.seq_lens[:rows],
            block_tables=inputs.block_tables[:rows],
            row_ends=inputs.row_ends[:rows],
            sampled_rows=inputs.sampled_rows[:sampled],
            sampled_slots=inputs.sampled_slots[:sampled],
            sampled_positions=inputs.sampled_positions[:sampled],
        )
        logits, recording = self._ops.record(lambda: self._forward.logits(batch))
        if recording is None:
            self._enabled = False
        else:
            self._remember(shape, _Recorded(recording, logits))
        return logits

    def _remember(self, shape: _Shape, recorded: _Recorded | None) -> None:
        self._seen[shape] = recorded
        self._seen.move_to_end(shape)
        if len(self._seen) > MAX_RECORDINGS:
            self._seen.popitem(last=False)

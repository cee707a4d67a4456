"""One step through the model: an input batch to hidden states, or to the logits of its samples."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.executor.models.base import GivenRows, LayerCache, Model, StepContext, Wanted
from quire.executor.step.input_batch import InputBatch
from quire.ops.backend import AttentionBatch, Backend


class Forward:
    """A model and its layers' caches, in pages of `block_size` tokens."""

    def __init__(self, model: Model, ops: Backend, caches: Sequence[LayerCache], block_size: int) -> None:
        self._model = model
        self._ops = ops
        self._caches = caches
        self._block_size = block_size

    def hidden(self, batch: InputBatch, given: GivenRows | None = None) -> torch.Tensor:
        """Of all tokens: [num_tokens, hidden]."""
        step = StepContext(batch.positions, self._caches, self._attention(batch, batch.query_lens), given=given)
        return self._model.forward(batch.token_ids, step)

    def logits(self, batch: InputBatch, given: GivenRows | None = None) -> torch.Tensor:
        """Of the rows that sample, [num_sampled, vocab_size]; other tokens are computed as far as anyone sees them."""
        wanted = None
        if len(batch.token_ids) > len(batch.query_lens):
            wanted = Wanted(batch.row_ends, self._attention(batch, np.ones_like(batch.query_lens)))
        attention = self._attention(batch, batch.query_lens)
        step = StepContext(batch.positions, self._caches, attention, given=given, wanted=wanted)
        hidden = self._model.forward(batch.token_ids, step)
        if not len(batch.sampled_rows):
            return hidden[:0]  # of which nobody reads any
        if len(batch.sampled_rows) < len(hidden):
            hidden = self._ops.take_rows(hidden, batch.sampled_rows)
        return self._model.compute_logits(hidden)

    def sampled_logits(self, hidden: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """Like `logits`, from the hidden states of all tokens."""
        ends = self._ops.take_rows(hidden, batch.row_ends)
        return self._model.compute_logits(self._ops.take_rows(ends, batch.sampled_rows))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self._model.compute_logits(hidden)

    def _attention(self, batch: InputBatch, query_lens: np.ndarray) -> list[AttentionBatch]:
        """By KV group, of the last `query_lens` tokens of each row; what is stored, is stored for all tokens."""
        return [
            self._ops.attention_batch(
                query_lens, batch.seq_lens, pages.block_tables, pages.slot_mapping, block_size=self._block_size
            )
            for pages in batch.pages
        ]

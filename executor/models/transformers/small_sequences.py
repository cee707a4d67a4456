"""Short sequences in separate memory: steps of a model before any request exists."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import LayerCache, StepContext
from quire.executor.models.base import Model
from quire.executor.models.transformers.stages import StagePart
from quire.ops.backend import AttentionBatch
from quire.ops.recurrent import StateRows


class SmallSequences:
    """RowByRow of the same tokens; each has a page of each layer and a slot of each state.

    A pipeline stage gets the same hidden states for each of them, instead of a message from the previous stage.
    """

    def __init__(
        self, model: Model, part: StagePart, context: ModelContext, vocab_size: int, num_rows: int, num_tokens: int
    ) -> None:
        """Takes the maximum of a row's tokens as `num_tokens`."""
        self._part = part
        self._context = context
        self._num_tokens = num_tokens
        device = context.device
        # Ids far from those of special tokens, which some classes treat differently.
        self._tokens = torch.arange(1, num_tokens + 1, device=device) * vocab_size // (num_tokens + 2)
        handed = torch.arange(num_tokens * part.token_size, device=device).mul(0.7).sin().to(context.dtype)
        self._handed = handed.view(num_tokens, -1)
        shapes = [layer.cache_shape(context.ops, num_rows, num_tokens, context.dtype) for layer in model.kv_layers]
        self._caches = [LayerCache(torch.zeros(shape, dtype=context.dtype, device=device), 0) for shape in shapes]
        self._states = [
            [
                torch.zeros((num_rows, *shape), dtype=dtype, device=device)
                for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
            ]
            for layer in model.state_layers
        ]
        self._num_computed = [0] * num_rows

    def step(self, step: Mapping[int, int]) -> tuple[Tensor, StepContext]:
        """Builds a step that computes the given number of tokens of each row; returns its tokens, too."""
        rows, lengths = np.array(list(step)), np.array(list(step.values()))
        computed = np.array([self._num_computed[row] for row in step])
        device = self._context.device
        places = [start + i for start, length in zip(computed, lengths, strict=True) for i in range(length)]
        positions = torch.tensor(places, device=device)
        slots = torch.from_numpy(rows.repeat(lengths) * self._num_tokens).to(device) + positions
        for row, length in step.items():
            self._num_computed[row] += length
        attention = [self._attention(lengths, computed + lengths, rows, slots)] if self._caches else []
        state_rows = StateRows(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(np.array([0, *lengths.cumsum()])),
            torch.from_numpy(computed == 0).to(device),
        )
        context = StepContext(
            positions,
            self._caches,
            attention,
            states=self._states,
            rows=state_rows,
            received=None if self._part.is_first else self._handed[positions].flatten(),
            hands_over=not self._part.is_last,
        )
        return self._tokens[positions], context

    def _attention(
        self, query_lens: np.ndarray, seq_lens: np.ndarray, rows: np.ndarray, slots: Tensor
    ) -> AttentionBatch:
        return self._context.ops.attention_batch(
            query_lens, seq_lens, rows[:, None], slots, block_size=self._num_tokens
        )  # fmt: skip

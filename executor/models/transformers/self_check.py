"""Whether a model that runs row by row gives the same logits however its tokens are cut into steps.

What the class keeps from step to step is its own code's: positions that it counts, states in modules instead of the
cache, another formula for single tokens, or a view of later tokens would show only in wrong texts.
"""

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import LayerCache, StepContext
from quire.executor.models.base import Model
from quire.ops.recurrent import StateRows

_NUM_TOKENS = 8
_STEPS: tuple[dict[int, int], ...] = ({0: 8}, {1: 5, 2: 1}, {1: 3, 2: 1}, *[{2: 1}] * 6)
"""New tokens of each row: the same sequence whole, in two parts, and one by one beside them."""
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2}
_TOLERANCE = 4e-2  # of bfloat16


def check_steps(model: Model, context: ModelContext, vocab_size: int) -> None:
    """Raises ModelLoadError if the logits of a few tokens depend on the steps in which they come.

    The difference is relative to the norm of all logits. Logits that are not finite tell nothing.
    """
    logits = _Steps(model, context, vocab_size).run()
    whole = logits[0]
    if not bool(whole.isfinite().all()):
        return
    difference = max(float((parts - whole).norm() / whole.norm()) for parts in logits[1:])
    tolerance = _TOLERANCES.get(context.dtype, _TOLERANCE)
    if not difference <= tolerance:  # NaN differs
        raise ModelLoadError(
            f"tokens that come in several steps give other logits than in one (by {difference:.1e} of their norm, of "
            f"which rounding explains {tolerance:.0e})"
        )


class _Steps:
    """Runs `_STEPS`; each row has a page of each layer and a slot of each state."""

    def __init__(self, model: Model, context: ModelContext, vocab_size: int) -> None:
        self._model = model
        self._context = context
        device = context.device
        # Numbers far from those of special tokens, which some classes treat in their own ways.
        self._tokens = torch.arange(1, _NUM_TOKENS + 1, device=device) * vocab_size // (_NUM_TOKENS + 2)
        num_rows = max(row for step in _STEPS for row in step) + 1
        shapes = [layer.cache_shape(context.ops, num_rows, _NUM_TOKENS) for layer in model.kv_layers]
        self._caches = [LayerCache(torch.zeros(shape, dtype=context.dtype, device=device), 0) for shape in shapes]
        self._states = [
            [
                torch.zeros((num_rows, *shape), dtype=dtype, device=device)
                for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
            ]
            for layer in model.state_layers
        ]
        self._logits: list[list[Tensor]] = [[] for _ in range(num_rows)]
        self._num_computed = [0] * num_rows

    @torch.inference_mode()
    def run(self) -> list[Tensor]:
        """Each row's logits [num_tokens, vocab] in float32."""
        for step in _STEPS:
            lengths = list(step.values())
            tokens = [self._num_computed[row] + place for row, length in step.items() for place in range(length)]
            places = torch.tensor(tokens, device=self._context.device)
            logits = self._model.compute_logits(self._model.forward(self._tokens[places], self._step(step, places)))
            for row, part in zip(step, logits.float().split(lengths), strict=True):
                self._logits[row].append(part)
                self._num_computed[row] += len(part)
        return [torch.cat(parts) for parts in self._logits]

    def _step(self, step: dict[int, int], positions: Tensor) -> StepContext:
        device = self._context.device
        rows, lengths = np.array(list(step)), np.array(list(step.values()))
        computed = np.array([self._num_computed[row] for row in step])
        slots = torch.from_numpy(rows.repeat(lengths) * _NUM_TOKENS).to(device) + positions
        batch = self._context.ops.attention_batch(
            lengths, computed + lengths, rows[:, None], slots, block_size=_NUM_TOKENS
        )
        return StepContext(
            positions,
            self._caches,
            [batch] if self._caches else [],
            states=self._states,
            rows=StateRows(
                torch.from_numpy(rows).to(device),
                torch.from_numpy(np.array([0, *lengths.cumsum()])),
                torch.from_numpy(computed == 0).to(device),
            ),
        )

"""Checks that a model which runs row by row gives the same logits in any division of its tokens into steps.

A class's code may count positions, keep states in modules instead of the cache, use another formula for single tokens,
or look at later tokens. Without this check such faults would show only in wrong texts.
"""

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.models.base import Model
from quire.executor.models.transformers.small_sequences import SmallSequences
from quire.executor.models.transformers.stages import StagePart

_NUM_TOKENS = 8
_STEPS: tuple[dict[int, int], ...] = ({0: 8}, {1: 5, 2: 1}, {1: 3, 2: 1}, *[{2: 1}] * 6)
"""The new tokens of each row in each step: the same sequence whole, in two parts, and one by one."""
_TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2}
_TOLERANCE = 4e-2  # for bfloat16


def check_steps(model: Model, part: StagePart, context: ModelContext, vocab_size: int) -> None:
    """Raises ModelLoadError if the logits of a few tokens depend on the steps in which they come.

    In a pipeline stage before the last, the message to the next stage is compared instead of logits. The difference is
    relative to the norm of all. Logits that are not finite prove nothing.
    """
    logits = _Steps(model, part, context, vocab_size).run()
    is_known = logits[0][0] != -torch.inf  # the other tokens only pad the embedding
    whole, *parts = (each[:, is_known] for each in logits)
    if not bool(whole.isfinite().all()):
        return
    difference = max(float((each - whole).norm() / whole.norm()) for each in parts)
    tolerance = _TOLERANCES.get(context.dtype, _TOLERANCE)
    if not difference <= tolerance:  # NaN differs
        raise ModelLoadError(
            f"tokens that come in several steps give other logits than in one (by {difference:.1e} of their norm, of "
            f"which rounding explains {tolerance:.0e})"
        )


class _Steps:
    """Runs `_STEPS`."""

    def __init__(self, model: Model, part: StagePart, context: ModelContext, vocab_size: int) -> None:
        self._model = model
        self._part = part
        num_rows = max(row for step in _STEPS for row in step) + 1
        self._sequences = SmallSequences(model, part, context, vocab_size, num_rows, _NUM_TOKENS)
        self._logits: list[list[Tensor]] = [[] for _ in range(num_rows)]

    @torch.inference_mode()
    def run(self) -> list[Tensor]:
        """Returns each row's logits [num_tokens, vocab] in float32, or the messages [num_tokens, size]."""
        for step in _STEPS:
            token_ids, context = self._sequences.step(step)
            hidden = self._model.forward(token_ids, context)
            is_last = self._part.is_last
            logits = self._model.compute_logits(hidden) if is_last else hidden.view(len(token_ids), -1)
            for row, part in zip(step, logits.float().split(list(step.values())), strict=True):
                self._logits[row].append(part)
        return [torch.cat(parts) for parts in self._logits]

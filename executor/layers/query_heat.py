"""A factor of queries that grows with their positions and keeps attention sharp in long contexts (arXiv:2501.19399)."""

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.ops.backend import Backend


class QueryHeat:
    """Multiplies the query at `position` by `1 + beta * log(1 + floor((position + first) / period))`."""

    def __init__(self, context: ModelContext, beta: float, period: int, first: int) -> None:
        positions = torch.arange(first, context.max_model_len + first, device=context.device, dtype=torch.float32)
        heat = positions.div(period).floor_().log1p_() * beta
        self._heat = heat.to(context.dtype).unsqueeze(1)  # the factor minus 1, by position

    def __call__(self, ops: Backend, q: Tensor, step: StepContext) -> Tensor:
        """Multiplies `q` [num_tokens, ...]."""
        heat = ops.take_rows(self._heat, step.positions)
        return ops.streams.predict(q.flatten(1).unsqueeze(0), heat)[0].view(q.shape)


def query_heat(context: ModelContext, beta: float, period: int, *, first: int = 0) -> QueryHeat | None:
    """Builds the factor; None if it is 1 at all positions."""
    return QueryHeat(context, beta, period, first) if context.max_model_len - 1 + first >= period else None

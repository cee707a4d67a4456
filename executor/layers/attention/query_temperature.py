"""A factor of queries that grows with their positions and keeps attention sharp in long contexts (arXiv:2501.19399)."""

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.ops.backend import Backend


class QueryTemperature:
    """Multiplies the query at `position` by `1 + beta * log(1 + floor((position + first) / period))`."""

    def __init__(self, context: ModelContext, beta: float, period: int, first: int) -> None:
        positions = torch.arange(first, context.max_model_len + first, device=context.device, dtype=torch.float32)
        temperature = positions.div(period).floor_().log1p_() * beta
        self._temperature = temperature.to(context.dtype).unsqueeze(1)  # the factor minus 1, by position

    def __call__(self, ops: Backend, q: Tensor, step: StepContext) -> Tensor:
        """Multiplies `q` [num_tokens, ...]."""
        temperature = ops.take_rows(self._temperature, step.positions)
        return ops.residual_streams.predict(q.flatten(1).unsqueeze(0), temperature)[0].view(q.shape)


def query_temperature(context: ModelContext, beta: float, period: int, *, first: int = 0) -> QueryTemperature | None:
    """Builds the factor; None if it is 1 at all positions."""
    return QueryTemperature(context, beta, period, first) if context.max_model_len - 1 + first >= period else None

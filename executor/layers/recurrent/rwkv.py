"""The two mixers of RWKV 4 (arXiv:2305.13048, section 3.1), whose states are a sequence's last token and sums."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear, whole
from quire.executor.layers.recurrent.base import RecurrentLayer, read_decay
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.recurrent import StateRows


@dataclass(frozen=True)
class RwkvShape:
    """Sizes of the whole model, before channels and inner dimensions are split over ranks.

    Attributes:
        channels: of the averages.
        inner_size: of the feed-forward network.
    """

    hidden_size: int
    channels: int
    inner_size: int


class TokenShift:
    """Mixes each token with the one before it, `m * x + (1 - m) * before`: a convolution of two tokens.

    Attributes:
        state_shape: of the state, the last token.
    """

    def __init__(self, context: ModelContext, name: str, size: int) -> None:
        own = context.read(name, (1, 1, size)).flatten()
        self._ops = context.ops
        self._weight = torch.stack((own.neg().add_(1), own))
        self.state_shape = (1, size)

    def __call__(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """`x` [num_tokens, size] → the same shape; `state` [num_slots, *state_shape] is overwritten."""
        return self._ops.recurrent.causal_conv1d(x, self._weight, None, state, rows)


class TimeMix(RecurrentLayer):
    """Computes `output(sigmoid(r) * averages(k, v))`; ranks divide the channels equally."""

    def __init__(self, context: ModelContext, place: LayerPlace, name: str, shape: RwkvShape) -> None:
        """Takes the layer's `name` in the checkpoint."""
        super().__init__(context, place)
        size, channels = shape.hidden_size, shape.channels
        own = context.shard(0, channels, "RWKV channels")
        parts = ("key", "value", "receptance")
        self._shifts = [TokenShift(context, f"{name}.time_mix_{part}", size) for part in parts]
        self._projections = [
            ColumnLinear(context, [LinearPart(f"{name}.{part}", channels, own)], size) for part in parts
        ]
        self._first = context.read(f"{name}.time_first", (channels,), own, torch.float32)
        self._log_decay = read_decay(context, f"{name}.time_decay", (channels,), own)
        self._out = RowLinear(context, f"{name}.output", channels, size, own._replace(dim=1))
        shifts = tuple(shift.state_shape for shift in self._shifts)
        self.state = LayerState((*shifts, (3, len(self._first))), (*[context.dtype] * 3, torch.float32))
        self.activation_size = 3 * size + 5 * len(self._first)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        *states, sums = step.states[self._place.number]
        k, v, r = (
            project(shift(x, state, step.rows))
            for project, shift, state in zip(self._projections, self._shifts, states, strict=True)
        )
        recurrent = self._ops.recurrent
        averages = recurrent.wkv(k, v, self._first, self._log_decay, sums, step.rows)
        return self._out(self.outputs_of(recurrent.multiply_gate(averages, r, "sigmoid"), step))


class ChannelMix(RecurrentLayer):
    """Computes `sigmoid(r) * value(relu(k)^2)`; ranks divide the inner dimensions equally."""

    def __init__(self, context: ModelContext, place: LayerPlace, name: str, shape: RwkvShape) -> None:
        """Takes the layer's `name` in the checkpoint."""
        super().__init__(context, place)
        size, inner = shape.hidden_size, shape.inner_size
        own = context.shard(0, inner, "inner numbers")
        self._shifts = [TokenShift(context, f"{name}.time_mix_{part}", size) for part in ("key", "receptance")]
        self._key = ColumnLinear(context, [LinearPart(f"{name}.key", inner, own)], size)
        self._receptance = ColumnLinear(context, [whole(f"{name}.receptance", size)], size)
        self._value = RowLinear(context, f"{name}.value", inner, size, own._replace(dim=1))
        self.state = LayerState(tuple(shift.state_shape for shift in self._shifts), (context.dtype,) * 2)
        self.activation_size = 5 * size + (own.stop - own.start)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        states = step.states[self._place.number]
        k, r = (
            self.outputs_of(shift(x, state, step.rows), step)
            for shift, state in zip(self._shifts, states, strict=True)
        )  # fmt: skip
        value = self._value(self._key(k, "relu2"))
        return self._ops.recurrent.multiply_gate(value, self._receptance(r), "sigmoid")

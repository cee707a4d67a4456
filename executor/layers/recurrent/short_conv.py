"""The gated short convolution of LFM2 (arXiv:2511.23404)."""

from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.recurrent.base import CausalConv1d, RecurrentLayer, parts_of, within
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext


class ShortConv(RecurrentLayer):
    """Computes `output(c * conv(b * x))`; one projection computes b, c and x. Every rank has equally many channels."""

    def __init__(
        self, context: ModelContext, place: LayerPlace, name: str, hidden_size: int, width: int, *, bias: bool = False
    ) -> None:
        """Takes the layer's `name` in the checkpoint, and as `width` the tokens that the convolution sees."""
        super().__init__(context, place)
        shard = context.shard(0, hidden_size, "convolution channels")
        shards = [within(shard, part * hidden_size) for part in range(3)]
        in_parts = parts_of(f"{name}.in_proj", shards, 3 * hidden_size)
        self._in = ColumnLinear(context, in_parts, hidden_size, bias=bias)
        conv_parts = parts_of(f"{name}.conv", [shard], hidden_size)
        self._conv = CausalConv1d(context, conv_parts, width, bias=bias, activation=None)
        self._out = RowLinear(context, f"{name}.out_proj", hidden_size, hidden_size, shard._replace(dim=1), bias=bias)
        self.state = LayerState((self._conv.state_shape,), (context.dtype,))
        self.activation_size = 6 * self._conv.size

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        [state] = step.states[self._place.number]
        multiply = self._ops.recurrent.multiply_gate
        projected, size = self._in(x), self._conv.size
        b, c, x = (projected[:, first : first + size] for first in (0, size, 2 * size))
        mixed = self._conv(multiply(x, b, "identity"), state, step.rows)
        return self._out(self.outputs_of(multiply(mixed, c, "identity"), step))

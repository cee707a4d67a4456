"""The recurrent block of Griffin (arXiv:2402.19427): a convolution and a gated linear recurrence, with a gate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.recurrent.base import CausalConv1d, RecurrentLayer
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.activations import PlainActivation
from quire.ops.recurrent import RgLruCall

_DECAY = 8.0
"""The factor of a channel's softplus parameter in the logarithm of its strongest decay."""


class RecurrentUnit(RecurrentLayer):
    """Projections, convolution, recurrence and output of one layer; ranks divide the heads of its gates equally."""

    def __init__(
        self, context: ModelContext, place: LayerPlace, name: str, *, hidden_size: int, channels: int, num_heads: int,
        conv_width: int, activation: PlainActivation,
    ) -> None:  # fmt: skip
        """Takes the block's `name` in the checkpoint; a head of its gates reads and writes `channels / num_heads`."""
        super().__init__(context, place)
        heads, size = context.shard(0, num_heads, "heads of recurrent gates"), channels // num_heads
        own = Shard(0, heads.start * size, heads.stop * size)
        self._activation: PlainActivation = activation
        self._in, self._gate = (
            ColumnLinear(context, [LinearPart(f"{name}.linear_{part}", channels, own)], hidden_size, bias=True)
            for part in "xy"
        )
        conv_parts = [LinearPart(f"{name}.conv_1d", channels, own)]
        self._conv = CausalConv1d(context, conv_parts, conv_width, bias=True, activation=None)
        self._gates = [
            context.read(f"{name}.rg_lru.{gate}_gate_weight", (num_heads, size, size), heads)
            for gate in ("input", "recurrent")
        ]
        self._biases = [
            context.read(f"{name}.rg_lru.{gate}_gate_bias", (num_heads, size), heads, torch.float32).flatten()
            for gate in ("input", "recurrent")
        ]
        parameter = context.read(f"{name}.rg_lru.recurrent_param", (channels,), own, torch.float32)
        self._log_decay = F.softplus(parameter) * -_DECAY
        self._out = RowLinear(context, f"{name}.linear_out", channels, hidden_size, own._replace(dim=1), bias=True)
        self.state = LayerState((self._conv.state_shape, (self._conv.size,)), (context.dtype, torch.float32))
        self.activation_size = 7 * self._conv.size

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        conv_state, state = step.states[self._place.number]
        mixed = self._conv(self._in(x), conv_state, step.rows)
        heads = mixed.unflatten(1, (len(self._gates[0]), -1))
        input_gate, decay_gate = (self._ops.latent.head_linear(heads, gate).flatten(1) for gate in self._gates)
        call = RgLruCall(mixed, input_gate, self._biases[0], decay_gate, self._biases[1], self._log_decay)
        out = self._ops.recurrent.rg_lru(call, state, step.rows)
        gate = self._gate(self.outputs_of(x, step), self._activation)
        return self._out(self._ops.recurrent.multiply_gate(self.outputs_of(out, step), gate, "identity"))

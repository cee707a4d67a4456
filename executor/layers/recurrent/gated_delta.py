"""Gated DeltaNet (arXiv:2412.06464): linear attention whose state decays by a gate and is corrected by a delta rule."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.recurrent.base import CausalConv1d, RecurrentLayer, parts_of, read_decay, within
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.recurrent import DeltaRuleCall, GateActivation


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of the whole model's layers, before they are split over ranks by key heads.

    Attributes:
        is_tiled: value heads are stored in llama.cpp's order: the first value head of each key head, then the second
            of each, and so on. Otherwise each key head's follow one another, as they do here.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    is_tiled: bool = False

    @property
    def key_size(self) -> int:
        """Elements of all queries, or keys, of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_value_heads * self.value_dim

    def of_value_heads(self, context: ModelContext, size: int, dim: int = 0, offset: int = 0) -> list[Shard]:
        """Returns the stored places of this rank's value heads, in order; each has `size` indices, the first at
        `offset`.
        """
        heads = context.shard(dim, self.num_value_heads, "linear attention heads")
        if not self.is_tiled:
            return [within(Shard(dim, heads.start * size, heads.stop * size), offset)]
        per_key = self.num_value_heads // self.num_key_heads
        places = [head % per_key * self.num_key_heads + head // per_key for head in range(heads.start, heads.stop)]
        return [Shard(dim, offset + place * size, offset + (place + 1) * size) for place in places]


class GatedDeltaNet(RecurrentLayer):
    """Projection, convolution, delta rule, gated norm and output of one layer."""

    def __init__(
        self,
        context: ModelContext,
        place: LayerPlace,
        shape: DeltaShape,
        parts: Sequence[LinearPart],
        eps: float,
        *,
        conv_parts: Sequence[LinearPart] | None = None,
        beta_scale: float = 1.0,
        gate_activation: GateActivation = "silu",
    ) -> None:
        """Takes as `parts` the rank's queries, keys, values, output gates, then `b` (for beta) and `a` (for the decay).

        `conv_parts` are the channels of its queries, keys and values; None: in one convolution. `eps` is the norm's,
        `beta_scale` as for `gated_delta_rule`, `gate_activation` that of the output gates.
        """
        name = f"{place.name}.linear_attn"
        super().__init__(context, place)
        self._key_dim, self._value_dim = shape.key_dim, shape.value_dim
        context.share(shape.num_key_heads, "linear attention heads")
        heads = context.shard(0, shape.num_value_heads, "linear attention heads")
        keys = context.shard(0, shape.key_size, "linear attention keys")
        values = context.shard(0, shape.value_size, "linear attention values")
        self._num_heads = heads.stop - heads.start
        self._key_size, self._value_size = keys.stop - keys.start, values.stop - values.start

        self._in = ColumnLinear(context, list(parts), shape.hidden_size)
        if conv_parts is None:
            own = shape.of_value_heads(context, shape.value_dim, offset=2 * shape.key_size)
            channels = [keys, within(keys, shape.key_size), *own]
            conv_parts = parts_of(f"{name}.conv1d", channels, 2 * shape.key_size + shape.value_size)
        self._conv = CausalConv1d(context, conv_parts, shape.conv_width)
        size, own = (shape.num_value_heads,), shape.of_value_heads(context, 1)
        self._decay = torch.cat([read_decay(context, f"{name}.A_log", size, shard) for shard in own])
        self._dt_bias = torch.cat([context.read(f"{name}.dt_bias", size, shard, torch.float32) for shard in own])
        self._norm = context.read(f"{name}.norm.weight", (shape.value_dim,))
        self._eps = eps
        self._beta_scale = beta_scale
        self._gate_activation: GateActivation = gate_activation
        inputs = shape.of_value_heads(context, shape.value_dim, dim=1)
        self._out = RowLinear(context, f"{name}.out_proj", shape.value_size, shape.hidden_size, inputs)
        self.state = LayerState(
            (self._conv.state_shape, (self._num_heads, shape.key_dim, shape.value_dim)), (context.dtype, torch.float32)
        )
        self.activation_size = 2 * self._conv.size + 3 * self._value_size

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        conv_state, state = step.states[self._place.number]
        rows, keys, heads = step.rows, self._key_size, self._num_heads
        projected = self._in(x)
        z_end = self._conv.size + self._value_size
        gate, beta, dt = (
            projected[:, begin:end]
            for begin, end in ((self._conv.size, z_end), (z_end, z_end + heads), (z_end + heads, z_end + 2 * heads))
        )
        mixed = self._conv(projected[:, : self._conv.size], conv_state, rows)
        q, k = (mixed[:, begin : begin + keys].unflatten(1, (-1, self._key_dim)) for begin in (0, keys))
        v = mixed[:, 2 * keys :].unflatten(1, (-1, self._value_dim))
        call = DeltaRuleCall(q, k, v, dt, self._dt_bias, self._decay, beta, beta_scale=self._beta_scale)
        out = self._ops.recurrent.gated_delta_rule(call, state, rows)
        out, gate = self.outputs_of(out.flatten(1), step), self.outputs_of(gate, step)
        out, gate = (part.unflatten(1, (-1, self._value_dim)) for part in (out, gate))
        out = self._ops.recurrent.gated_rms_norm(
            out, gate, self._norm, self._eps, gate_first=False, activation=self._gate_activation
        )
        return self._out(out.flatten(1))

"""The matrix memory of xLSTM as a layer (arXiv:2405.04517, section 2.3; arXiv:2503.13427)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.recurrent.base import RecurrentLayer
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart


@dataclass(frozen=True)
class MatrixMemoryShape:
    """Sizes of the whole model's layers, before their heads are split over ranks.

    Attributes:
        key_size: elements of all heads' keys together; `value_size` is of their values.
        gate_cap: caps the inputs of a head's two gates, as `AttentionForm.softcap` does.
        norm_eps: of the norm of each head's outputs.
        eps: added to the divisor of the memory's outputs.
    """

    hidden_size: int
    num_heads: int
    key_size: int
    value_size: int
    gate_cap: float
    norm_eps: float
    eps: float


class MatrixMemory(RecurrentLayer):
    """Projections, memory, a norm of each head, a gate and the output of one layer; ranks divide the heads equally."""

    def __init__(self, context: ModelContext, place: LayerPlace, name: str, shape: MatrixMemoryShape) -> None:
        """Takes the layer's `name` in the checkpoint."""
        super().__init__(context, place)
        self._shape = shape
        self._num_heads = heads = context.share(shape.num_heads, "xLSTM heads")
        keys = context.shard(0, shape.key_size, "key outputs")
        values = context.shard(0, shape.value_size, "value outputs")
        gates = context.shard(0, shape.num_heads, "xLSTM heads")
        self._sizes = [part.stop - part.start for part in (keys, keys, values, values)]
        parts = [
            LinearPart(f"{name}.q", shape.key_size, keys),
            LinearPart(f"{name}.k", shape.key_size, keys),
            LinearPart(f"{name}.v", shape.value_size, values),
            LinearPart(f"{name}.ogate_preact", shape.value_size, values),
        ]
        self._in = ColumnLinear(context, parts, shape.hidden_size)
        gate_parts = [LinearPart(f"{name}.{gate}_preact", shape.num_heads, gates) for gate in ("igate", "fgate")]
        self._gates = ColumnLinear(context, gate_parts, shape.hidden_size, bias=True)
        weight = NormStyle(shape.norm_eps).read(context, f"{name}.multihead_norm", shape.value_size)
        self._norm = weight.view(shape.num_heads, -1)[gates.start : gates.stop].contiguous()
        self._out = RowLinear(context, f"{name}.out_proj", shape.value_size, shape.hidden_size, values._replace(dim=1))
        memory = (heads, self._sizes[0] // heads + 1, self._sizes[2] // heads + 1)
        self.state = LayerState((memory,), (torch.float32,))
        self.activation_size = sum(self._sizes) + 2 * self._sizes[2] + 2 * heads

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        (state,) = step.states[self._place.number]
        projected, heads, begin, parts = self._in(x), self._num_heads, 0, []
        for size in self._sizes:
            parts.append(projected[:, begin : begin + size])
            begin += size
        q, k, v = (part.unflatten(1, (heads, -1)) for part in parts[:3])
        gates = self._ops.scale(self._gates(x), 1.0, self._shape.gate_cap)
        out = self._ops.recurrent.mlstm(
            q, k, v, gates[:, :heads], gates[:, heads:], state, step.rows, eps=self._shape.eps
        )  # fmt: skip
        normal = self._ops.layer_norm(out, self._norm, None, self._shape.norm_eps).flatten(1)
        gated = self._ops.recurrent.multiply_gate(normal, parts[3], "sigmoid")
        return self._out(self.outputs_of(gated, step))

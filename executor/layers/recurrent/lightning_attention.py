"""Lightning attention (arXiv:2501.08313): linear attention whose heads decay at constant rates."""

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import AttentionShape, LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.norm import NormStyle
from quire.executor.layers.recurrent.base import RecurrentLayer, parts_of
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard

_NORM = NormStyle(1e-6)


class LightningAttention(RecurrentLayer):
    """Activated projections, linear attention, a norm over all heads, a gate and the output of one layer."""

    def __init__(self, context: ModelContext, place: LayerPlace, shape: AttentionShape, num_layers: int) -> None:
        """Takes the model's `num_layers`; later layers decay more slowly."""
        super().__init__(context, place)
        self._group = context.group
        self._head_dim, name = shape.head_dim, f"{place.name}.self_attn"
        total = shape.num_heads * shape.head_dim
        heads = context.shard(0, shape.num_heads, "attention heads")
        self._own = context.shard(0, total, "query outputs")
        self._size = self._own.stop - self._own.start
        starts = [
            (3 * head + part) * shape.head_dim for part in range(3) for head in range(heads.start, heads.stop)
        ]  # stored by head: its query, key and value
        shards = [Shard(0, start, start + shape.head_dim) for start in starts]
        self._qkv = ColumnLinear(context, parts_of(f"{name}.qkv_proj", shards, 3 * total), shape.hidden_size)
        self._gate = ColumnLinear(context, [LinearPart(f"{name}.output_gate", total, self._own)], shape.hidden_size)
        self._norm = _NORM.read(context, f"{name}.norm", total)
        self._out = RowLinear(context, f"{name}.out_proj", total, shape.hidden_size, self._own._replace(dim=1))
        factor = 1 - place.index / (num_layers - 1 + 1e-5) + 1e-5
        slopes = torch.tensor([2 ** (-8 * (head + 1) / shape.num_heads) for head in range(heads.start, heads.stop)])
        self._log_decay = (slopes * -factor).to(context.device)
        state_shape = (heads.stop - heads.start, shape.head_dim, shape.head_dim)
        self.state = LayerState((state_shape,), (torch.float32,))
        self.activation_size = 6 * self._size

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        (state,) = step.states[self._place.number]
        qkv = self._qkv(x, "silu")
        q, k, v = (
            qkv[:, begin : begin + self._size].unflatten(1, (-1, self._head_dim))
            for begin in (0, self._size, 2 * self._size)
        )
        out = self._ops.recurrent.lightning_attention(q, k, v, self._log_decay, state, step.rows)
        normal = self._normalized(self.outputs_of(out.flatten(1), step))
        gate = self._gate(self.outputs_of(x, step))
        return self._out(self._ops.recurrent.multiply_gate(normal, gate, "sigmoid"))

    def _normalized(self, out: Tensor) -> Tensor:
        """Computes the rank's part of the norm over all heads."""
        if self._group.size == 1:
            return self._ops.rms_norm(out, self._norm, _NORM.eps)
        whole = self._ops.rms_norm(self._group.all_gather(out, dim=-1), self._norm, _NORM.eps)
        return whole[:, self._own.start : self._own.stop]

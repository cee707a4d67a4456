"""Kimi Delta Attention (arXiv:2510.26692): a Gated DeltaNet in which each channel of the keys has its own decay."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, LowRankLinear, RowLinear
from quire.executor.layers.recurrent.base import CausalConv1d, RecurrentLayer, read_decay
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard, Stored
from quire.ops.recurrent import DeltaRuleCall


@dataclass(frozen=True)
class KimiDeltaShape:
    """Sizes of the whole model's layers, before their heads are split over ranks. Keys are as large as values.

    Attributes:
        gate_rank: of the low-rank layers for a token's decays and output gates; None: one layer each.
        least_log_decay: see `RecurrentOperations.gated_delta_rule`.
        eps: of the norm of a head's outputs.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int
    gate_rank: int | None
    least_log_decay: float | None
    eps: float


class KimiDeltaAttention(RecurrentLayer):
    """Projections, convolutions, delta rule, gated norm and output of one layer."""

    def __init__(self, context: ModelContext, place: LayerPlace, shape: KimiDeltaShape) -> None:
        super().__init__(context, place)
        self._shape = shape
        name, total, hidden_size = f"{place.name}.self_attn", shape.num_heads * shape.head_dim, shape.hidden_size
        heads = context.shard(0, shape.num_heads, "linear attention heads")
        own = context.shard(0, total, "linear attention channels")
        self._size = own.stop - own.start

        mixed = [LinearPart(f"{name}.{x}_proj", total, own) for x in "qkv"]
        self._in = ColumnLinear(context, [*mixed, LinearPart(f"{name}.b_proj", shape.num_heads, heads)], hidden_size)
        gates = [LinearPart(f"{name}.f_proj", total, own), LinearPart(f"{name}.g_proj", total, own)]
        self._gates: ColumnLinear | LowRankLinear = (
            ColumnLinear(context, gates, hidden_size)
            if shape.gate_rank is None
            else LowRankLinear(context, [[part] for part in gates], hidden_size, shape.gate_rank)
        )
        conv_parts = [LinearPart(f"{name}.{x}_conv1d", total, own) for x in "qkv"]
        self._conv = CausalConv1d(context, conv_parts, shape.conv_width)
        self._decay = _read_decay(context, f"{name}.A_log", shape.num_heads, heads)
        dt_bias = context.read(f"{name}.dt_bias", (total,), own, torch.float32)
        self._dt_bias = dt_bias.view(-1, shape.head_dim)
        self._norm = context.read(f"{name}.o_norm.weight", (shape.head_dim,))
        self._out = RowLinear(context, f"{name}.o_proj", total, hidden_size, own._replace(dim=1))
        state_shape = (heads.stop - heads.start, shape.head_dim, shape.head_dim)
        self.state = LayerState((self._conv.state_shape, state_shape), (context.dtype, torch.float32))
        self.activation_size = 10 * self._size + 2 * (shape.gate_rank or 0)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        conv_state, state = step.states[self._place.number]
        size, recurrent = self._size, self._ops.recurrent
        projected, gates = self._in(x), self._gates(x)
        mixed = self._conv(projected[:, : 3 * size], conv_state, step.rows)
        q, k, v = (self._heads(mixed[:, begin : begin + size]) for begin in (0, size, 2 * size))
        call = DeltaRuleCall(
            q, k, v, self._heads(gates[:, :size]), self._dt_bias, self._decay, projected[:, 3 * size :],
            least_log_decay=self._shape.least_log_decay,
        )  # fmt: skip
        out = recurrent.gated_delta_rule(call, state, step.rows)
        out, gate = self.outputs_of(out.flatten(1), step), self.outputs_of(gates[:, size:], step)
        out = recurrent.gated_rms_norm(
            self._heads(out), self._heads(gate), self._norm, self._shape.eps, gate_first=False, activation="sigmoid"
        )
        return self._out(out.flatten(1))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(1, (-1, self._shape.head_dim))


def _read_decay(context: ModelContext, name: str, num_heads: int, heads: Shard) -> Tensor:
    """Runs `read_decay` for a tensor [heads], or one with further dimensions of size 1, as in Kimi Linear's
    checkpoints.
    """
    stored = context.find(name, Stored((num_heads,), torch.float32))
    shape = (num_heads,) if stored is None else stored.shape
    dim = shape.index(num_heads) if num_heads in shape else 0
    return read_decay(context, name, shape, heads._replace(dim=dim)).flatten()

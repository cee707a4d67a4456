"""The Mamba 2 mixer (arXiv:2405.21060)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace, kv_head_shard
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.recurrent.base import CausalConv1d, RecurrentLayer, parts_of, read_decay, within
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.ops.recurrent import SsdCall


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of the whole model's mixers, before they are split over ranks by heads, and differences between families.

    Attributes:
        num_groups: heads of one group share b and c; the norm treats each group separately.
        norm_eps: of the gated norm; None: the outputs are only gated.
        is_gate_first: the gate multiplies before the norm, not after it.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    norm_eps: float | None
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    is_gate_first: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        """Outputs of all heads for a token."""
        return self.num_heads * self.head_dim


class Mamba2Mixer(RecurrentLayer):
    """Projection, convolution, scan, gated norm and output of one layer.

    Every rank has an equal part of the heads, and the groups that they read.
    """

    def __init__(self, context: ModelContext, place: LayerPlace, shape: Mamba2Shape, name: str) -> None:
        """Takes the mixer's `name` in the checkpoint."""
        super().__init__(context, place)
        self._group = context.group
        self._shape = shape
        inner, groups_size = shape.inner_size, shape.num_groups * shape.state_size
        heads = context.shard(0, shape.num_heads, "Mamba heads")
        self._inner = context.shard(0, inner, "Mamba outputs")
        groups = kv_head_shard(context, shape.num_groups, shape.state_size)
        self._num_heads, self._groups_size = heads.stop - heads.start, groups.stop - groups.start

        channels = [self._inner, within(groups, inner), within(groups, inner + groups_size)]
        total = 2 * inner + 2 * groups_size
        shards = [self._inner, *(within(shard, inner) for shard in channels), within(heads, total)]
        in_parts = parts_of(f"{name}.in_proj", shards, total + shape.num_heads)
        self._in = ColumnLinear(context, in_parts, shape.hidden_size, bias=shape.bias)
        conv_parts = parts_of(f"{name}.conv1d", channels, inner + 2 * groups_size)
        self._conv = CausalConv1d(context, conv_parts, shape.conv_width, bias=shape.conv_bias)
        size = (shape.num_heads,)
        self._decay = read_decay(context, f"{name}.A_log", size, heads)
        self._dt_bias, self._skip = (context.read(f"{name}.{p}", size, heads, torch.float32) for p in ("dt_bias", "D"))
        self._norm: Tensor | None = None
        self._is_norm_whole = context.group.size > 1 and shape.num_groups % context.group.size != 0
        if shape.norm_eps is not None:
            self._norm = context.read(
                f"{name}.norm.weight", (inner,), None if self._is_norm_whole else self._inner
            ).unflatten(0, (-1, inner // shape.num_groups))
        self._out = RowLinear(
            context, f"{name}.out_proj", inner, shape.hidden_size, self._inner._replace(dim=1), bias=shape.output_bias
        )
        self.state = LayerState(
            (self._conv.state_shape, (self._num_heads, shape.state_size, shape.head_dim)),
            (context.dtype, torch.float32),
        )
        self.activation_size = 2 * self._conv.size + 3 * self._num_heads * shape.head_dim

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        conv_state, state = step.states[self._place.number]
        shape, own = self._shape, self._num_heads * self._shape.head_dim
        projected = self._in(x)
        gate, dt = projected[:, :own], projected[:, own + self._conv.size :]
        mixed = self._conv(projected[:, own : own + self._conv.size], conv_state, step.rows)
        values = mixed[:, :own].unflatten(1, (-1, shape.head_dim))
        b, c = (
            mixed[:, begin : begin + self._groups_size].unflatten(1, (-1, shape.state_size))
            for begin in (own, own + self._groups_size)
        )
        out = self._ops.recurrent.ssd(
            SsdCall(values, dt, self._dt_bias, shape.dt_limit, self._decay, b, c, self._skip), state, step.rows
        )
        return self._out(self._gated(self.outputs_of(out.flatten(1), step), self.outputs_of(gate, step)))

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Applies the gated norm, or only the gate; both are [num_tokens, this rank's outputs]."""
        if self._norm is None or self._shape.norm_eps is None:
            return self._ops.recurrent.multiply_gate(out, gate, "silu")
        if self._is_norm_whole:
            out, gate = (self._group.all_gather(part.contiguous(), dim=-1) for part in (out, gate))
        out, gate = (part.unflatten(1, self._norm.shape) for part in (out, gate))
        normal = self._ops.recurrent.gated_rms_norm(
            out, gate, self._norm, self._shape.norm_eps, gate_first=self._shape.is_gate_first
        ).flatten(1)
        return normal[:, self._inner.start : self._inner.stop] if self._is_norm_whole else normal

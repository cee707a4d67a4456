"""The Mamba mixer, of the first kind (arXiv:2312.00752)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, RowLinear
from quire.executor.layers.recurrent.base import CausalConv1d, RecurrentLayer, parts_of, read_decay, within
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.ops.recurrent import ScanCall


@dataclass(frozen=True)
class MambaShape:
    """Sizes of the whole model's mixers, before they are split over ranks by channels, and differences between
    families.

    Attributes:
        dt_rank: of the low-rank projection to a token's time steps.
        parameter_norm: of a token's dt, b and c: none, RMS norms without weights, or with the checkpoint's.
    """

    hidden_size: int
    channels: int
    state_size: int
    dt_rank: int
    conv_width: int
    conv_bias: bool = True
    bias: bool = False
    parameter_norm: Literal["none", "plain", "weighted"] = "none"
    norm_eps: float = 1e-6


class MambaMixer(RecurrentLayer):
    """Projection, convolution, scan with a gate, and output of one layer; ranks divide the channels equally."""

    def __init__(self, context: ModelContext, place: LayerPlace, shape: MambaShape, name: str) -> None:
        """Takes the mixer's `name` in the checkpoint."""
        super().__init__(context, place)
        channels, size = shape.channels, shape.state_size
        own = context.shard(0, channels, "Mamba channels")
        self._sizes = (shape.dt_rank, size, size)
        in_parts = parts_of(f"{name}.in_proj", [own, within(own, channels)], 2 * channels)
        self._in = ColumnLinear(context, in_parts, shape.hidden_size, bias=shape.bias)
        conv_parts = [LinearPart(f"{name}.conv1d", channels, own)]
        self._conv = CausalConv1d(context, conv_parts, shape.conv_width, bias=shape.conv_bias)
        across = own._replace(dim=1)
        self._parameters = RowLinear(context, f"{name}.x_proj", channels, sum(self._sizes), across)
        self._dt = ColumnLinear(context, [LinearPart(f"{name}.dt_proj", channels, own)], shape.dt_rank)
        self._dt_bias, self._skip = (
            context.read(f"{name}.{part}", (channels,), own, torch.float32) for part in ("dt_proj.bias", "D")
        )
        self._decay = read_decay(context, f"{name}.A_log", (channels, size), own).T.contiguous()
        self._norms = _norm_weights(context, name, shape)
        self._norm_eps = shape.norm_eps
        self._out = RowLinear(context, f"{name}.out_proj", channels, shape.hidden_size, across, bias=shape.bias)
        self.state = LayerState((self._conv.state_shape, (size, self._conv.size)), (context.dtype, torch.float32))
        self.activation_size = 5 * self._conv.size + sum(self._sizes)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""
        conv_state, state = step.states[self._place.number]
        projected = self._in(x)
        mixed = self._conv(projected[:, : self._conv.size], conv_state, step.rows)
        gate = projected[:, self._conv.size :]
        dt, b, c = self._token_parameters(mixed)
        call = ScanCall(mixed, self._dt(dt), self._dt_bias, self._decay, b, c, self._skip, gate)
        out = self._ops.recurrent.selective_scan(call, state, step.rows)
        return self._out(self.outputs_of(out, step))

    def _token_parameters(self, mixed: Tensor) -> list[Tensor]:
        """Computes a token's dt [num_tokens, dt_rank], b and c [num_tokens, state_size]."""
        parameters, parts, begin = self._parameters(mixed), [], 0
        for place, size in enumerate(self._sizes):
            part = parameters[:, begin : begin + size]
            parts.append(self._ops.rms_norm(part, self._norms[place], self._norm_eps) if self._norms else part)
            begin += size
        return parts


def _norm_weights(context: ModelContext, name: str, shape: MambaShape) -> list[Tensor]:
    """Reads the weights of the norms of dt, b and c, if there are such norms."""
    sizes = {"dt": shape.dt_rank, "b": shape.state_size, "c": shape.state_size}
    if shape.parameter_norm == "none":
        return []
    if shape.parameter_norm == "plain":
        return [torch.ones(size, dtype=context.dtype, device=context.device) for size in sizes.values()]
    return [context.read(f"{name}.{part}_layernorm.weight", (size,)) for part, size in sizes.items()]

"""Linear layers that are split over the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

A column layer splits its outputs and needs no communication. A row layer takes inputs that a column layer left split,
and adds the partial results of all ranks.
"""

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.weights.quantisation.scheme import Part
from quire.executor.weights.readers import Shard
from quire.ops.backend import Activation, LinearWeight


class ColumnLinear:
    """One or more layers with the same input, fused: [num_tokens, in] → [num_tokens, sum of the parts' shards]."""

    def __init__(self, context: ModelContext, parts: list[Part], in_features: int, *, bias: bool = False) -> None:
        self._ops = context.ops
        self._packed = context.ops.pack_linear(*_read(context, parts, in_features, bias))

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._packed)


class GatedLinear:
    """`activation(gate(x)) * up(x)`, both in one product: [num_tokens, in] → [num_tokens, a part's shard]."""

    def __init__(
        self,
        context: ModelContext,
        gate: Part,
        up: Part,
        in_features: int,
        activation: Activation,
        *,
        bias: bool = False,
    ) -> None:
        self._ops = context.ops
        self._activation = activation
        self._packed = context.ops.pack_gated_linear(*_read(context, [gate, up], in_features, bias))

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated_linear(x, self._packed, self._activation)


class RowLinear:
    """[num_tokens, this rank's inputs] → [num_tokens, out], the same on every rank."""

    def __init__(
        self, context: ModelContext, name: str, in_features: int, out_features: int, shard: Shard, *, bias: bool = False
    ) -> None:
        """`shard` is the rank's part of dimension 1."""
        self._ops = context.ops
        self._group = context.group
        # Partial results are added up, so only one rank may add the bias.
        has_bias = bias and context.group.rank == 0
        self._packed = context.ops.pack_linear(
            context.scheme.read_weight(context, [Part(name, out_features, shard)], in_features),
            context.read(f"{name}.bias", (out_features,)) if has_bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """The rank's part of the outputs: summed over ranks, they are `__call__`'s."""
        return self._ops.linear(x, self._packed)


def _read(context: ModelContext, parts: list[Part], in_features: int, bias: bool) -> tuple[LinearWeight, Tensor | None]:
    """Weight [outputs of all parts, in] and bias of layers with the same input."""
    biases = [context.read(f"{name}.bias", (out,), shard) for name, out, shard in parts] if bias else []
    return context.scheme.read_weight(context, parts, in_features), torch.cat(biases) if bias else None

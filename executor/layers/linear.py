"""Linear layers that are split over the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

A column layer splits its outputs and needs no communication. A row layer takes inputs that a column layer left split,
and adds the partial results of all ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.executor.layers.adapted import base_layers
from quire.executor.layers.adapters import LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.activations import Activation, PlainActivation
from quire.ops.backend import Backend
from quire.ops.linear import LinearWeight


class ColumnLinear:
    """One or more layers with the same input, fused: [num_tokens, in] → [num_tokens, sum of the parts' shards].

    Neighbouring parts with weights of one form are one product, others one each.
    """

    def __init__(self, context: ModelContext, parts: list[LinearPart], in_features: int, *, bias: bool = False) -> None:
        self._ops = context.ops
        self._products = context.packing.products(lambda: _read_runs(context, parts, in_features, bias))
        place = context.adapters
        self._adapters = None
        if place is not None:
            self._adapters = place.of_columns(base_layers(context, parts, in_features, bias=bias))

    @property
    def adapters(self) -> LayerAdapters | None:
        """The place of adapters; None: it takes none."""
        return self._adapters

    def __call__(self, x: Tensor, activation: PlainActivation | None = None) -> Tensor:
        """Runs `Backend.activate` on the outputs, if an `activation` is given."""
        if len(self._products) == 1 and self._adapters is None:
            return self._ops.linear(x, self._products[0], activation)
        x, out = self._outputs(x)
        if self._adapters is not None:
            out = self._adapters.add(x, out)
        return out if activation is None else self._ops.activate(out, activation)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Runs `Backend.activate_and_mul` on the outputs, which are gates and then their ups."""
        x, out = self._outputs(x)
        if self._adapters is None:
            return self._ops.activate_and_mul(out, activation)
        return self._adapters.add_gated(x, out, activation)

    def _outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs, perhaps scaled by adapters, and their outputs without what adapters add."""
        if self._adapters is not None:
            x = self._adapters.scale(x)
        outputs = [self._ops.linear(x, packed) for packed in self._products]
        return x, outputs[0] if len(outputs) == 1 else self._ops.join(outputs)


class GatedLinear:
    """Computes `activation(gate(x)) * up(x)`: [num_tokens, in] → [num_tokens, a part's shard].

    Both are one product if their weights have one form. Adapters change the gates before the activation, so with
    adapters the activation follows their products.
    """

    def __init__(
        self,
        context: ModelContext,
        gate: LinearPart,
        up: LinearPart,
        in_features: int,
        activation: Activation,
        *,
        bias: bool = False,
    ) -> None:
        self._ops = context.ops
        self._activation = activation
        self._both: ColumnLinear | None = None
        if context.adapters is not None:
            self._both = ColumnLinear(context, [gate, up], in_features, bias=bias)
            return
        self._products = context.packing.gated(lambda: _read_runs(context, [gate, up], in_features, bias))

    @property
    def adapters(self) -> LayerAdapters | None:
        """The place of adapters; None: it takes none."""
        return None if self._both is None else self._both.adapters

    def __call__(self, x: Tensor) -> Tensor:
        if self._both is not None:
            return self._both.gated(x, self._activation)
        if len(self._products) == 1:
            return self._ops.gated_linear(x, self._products[0], self._activation)
        gates_and_ups = self._ops.join([self._ops.linear(x, packed) for packed in self._products])
        return self._ops.activate_and_mul(gates_and_ups, self._activation)


class AdaptedLinear:
    """The sum of a layer and its adapter: [num_tokens, in] → [num_tokens, out]."""

    def __init__(self, ops: Backend, base: "ColumnLinear | AdaptedLinear", adapter: "LowRankLinear") -> None:
        self._ops = ops
        self._base = base
        self._adapter = adapter

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.add(self._adapter(x), self._base(x))


class LowRankLinear:
    """Layers with the same input, each a product of two low-rank ones (LoRA, arXiv:2106.09685): see `ColumnLinear`."""

    def __init__(self, context: ModelContext, layers: list[list[LinearPart]], in_features: int, rank: int) -> None:
        """Takes each layer as its parts. The low-rank layers of one called `name` are `name.0` and `name.1`."""
        self._ops = context.ops
        self._rank = rank
        self._down = ColumnLinear(context, [whole(f"{parts[0].name}.0", rank) for parts in layers], in_features)
        self._up = [
            ColumnLinear(context, [part._replace(name=f"{part.name}.1") for part in parts], rank) for parts in layers
        ]

    def __call__(self, x: Tensor) -> Tensor:
        inner, rank = self._down(x), self._rank
        return self._ops.join([up(inner[:, i * rank : (i + 1) * rank]) for i, up in enumerate(self._up)])


class RowLinear:
    """Maps [num_tokens, this rank's inputs] to [num_tokens, out], the same on every rank."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        shard: Shard | Sequence[Shard],
        *,
        bias: bool = False,
    ) -> None:
        """Takes as `shard` the rank's part of dimension 1, or its parts in the order of `x`."""
        shards = [shard] if isinstance(shard, Shard) else shard
        self._ops = context.ops
        self._group = context.group
        # Partial results are summed, so only one rank may add the bias.
        has_bias = bias and context.group.rank == 0
        self._packed = context.packing.linear(
            lambda: (
                sharding.join_inputs(
                    [
                        context.scheme.read_weight(context, LinearPart(name, out_features, each), in_features)
                        for each in shards
                    ]
                ),
                context.read(f"{name}.bias", (out_features,)) if has_bias else None,
            )
        )
        place = context.adapters
        self._adapters = None
        if place is not None:
            part = LinearPart(name, out_features, shards[0])
            [base] = base_layers(context, [part], in_features, bias=bias)
            self._adapters = place.of_rows(base, shards, has_bias=context.group.rank == 0)

    @property
    def adapters(self) -> LayerAdapters | None:
        """The place of adapters; None: it takes none."""
        return self._adapters

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """Computes the rank's part of the outputs; their sum over ranks is the result of `__call__`."""
        if self._adapters is None:
            return self._ops.linear(x, self._packed)
        x = self._adapters.scale(x)
        return self._adapters.add(x, self._ops.linear(x, self._packed))


def whole(name: str, size: int) -> LinearPart:
    """Returns a layer whose outputs every rank has."""
    return LinearPart(name, size, Shard(0, 0, size))


def _read_runs(
    context: ModelContext, parts: list[LinearPart], in_features: int, bias: bool
) -> list[tuple[LinearWeight, Tensor | None]]:
    """Reads weight [outputs of some parts, in] and bias of each product with the same input."""
    biases = [context.read(f"{name}.bias", (out,), shard) for name, out, shard, _ in parts] if bias else []
    weights = [context.scheme.read_weight(context, part, in_features) for part in parts]
    return [
        (sharding.join(weights[run], context.dtype), torch.cat(biases[run]) if bias else None)
        for run in sharding.runs(weights)
    ]

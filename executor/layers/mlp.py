"""Feed-forward networks: gated (SwiGLU and GeGLU, arXiv:2002.05202), and with one activated layer."""

from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, GatedLinear, RowLinear
from quire.executor.weights.quantisation.scheme import Part
from quire.executor.weights.readers import Shard
from quire.ops.backend import Activation, PlainActivation


class GatedMLP:
    """`down(activation(gate(x)) * up(x))`, gate and up in one product.

    Attributes:
        activation_size: numbers that the layer makes of each token: gate, up, and their product.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        *,
        bias: bool = False,
    ) -> None:
        shard = context.shard(0, intermediate_size, "intermediate (feed-forward) dimensions")
        self.activation_size = 3 * (shard.stop - shard.start)
        gate, up = (Part(f"{name}.{part}", intermediate_size, shard) for part in ("gate_proj", "up_proj"))
        self._gate_up = GatedLinear(context, gate, up, hidden_size, activation, bias=bias)
        self._down = RowLinear(
            context, f"{name}.down_proj", intermediate_size, hidden_size, Shard(1, shard.start, shard.stop), bias=bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        return self._down(self._gate_up(x))

    def partial(self, x: Tensor) -> Tensor:
        """The rank's part of the outputs: summed over ranks, they are `__call__`'s."""
        return self._down.partial(self._gate_up(x))


class MLP:
    """`down(activation(up(x)))`.

    Attributes:
        activation_size: numbers that the layer makes of each token.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: PlainActivation,
        *,
        bias: bool = True,
    ) -> None:
        shard = context.shard(0, intermediate_size, "intermediate (feed-forward) dimensions")
        self.activation_size = shard.stop - shard.start
        self._ops = context.ops
        self._activation = activation
        self._up = ColumnLinear(context, [Part(f"{name}.up_proj", intermediate_size, shard)], hidden_size, bias=bias)
        self._down = RowLinear(
            context, f"{name}.down_proj", intermediate_size, hidden_size, Shard(1, shard.start, shard.stop), bias=bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        return self._down(self._ops.activate(self._up(x), self._activation))

"""Feed-forward networks: gated (SwiGLU and GeGLU, arXiv:2002.05202), and with one activated layer."""

from torch import Tensor

from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, GatedLinear, RowLinear
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.activations import Activation, PlainActivation


class GatedMLP:
    """Computes `down(activation(gate(x)) * up(x))`, with gate and up in one product.

    Attributes:
        activation_size: values that the layer computes for each token: gate, up, and their product.
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
        down_bias: bool | None = None,
    ) -> None:
        """Takes `down_bias` if the last layer differs from the others in having a bias."""
        shard = context.shard(0, intermediate_size, "intermediate (feed-forward) dimensions")
        self.activation_size = 3 * (shard.stop - shard.start)
        down_bias = bias if down_bias is None else down_bias
        gate, up = (LinearPart(f"{name}.{part}", intermediate_size, shard) for part in ("gate_proj", "up_proj"))
        self._gate_up = GatedLinear(context, gate, up, hidden_size, activation, bias=bias)
        self._down = RowLinear(
            context, f"{name}.down_proj", intermediate_size, hidden_size, shard._replace(dim=1), bias=down_bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        return self._down(self._gate_up(x))

    def partial(self, x: Tensor) -> Tensor:
        """Computes the rank's part of the outputs; their sum over ranks is the result of `__call__`."""
        return self._down.partial(self._gate_up(x))


class SparseMLP:
    """A `GatedMLP` with sparse gates: a token's gates below a cutoff are zero, and the excess of others is activated.

    The cutoff is the mean of all gates of the token plus `deviations` times their standard deviation.

    Attributes:
        activation_size: values that the layer computes for each token: gates of all ranks, ups, and their product.
    """

    def __init__(
        self,
        context: ModelContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: PlainActivation,
        deviations: float,
    ) -> None:
        shard = context.shard(0, intermediate_size, "intermediate (feed-forward) dimensions")
        parts = [LinearPart(f"{name}.{part}", intermediate_size, shard) for part in ("gate_proj", "up_proj")]
        self._size = shard.stop - shard.start
        self.activation_size = intermediate_size + 3 * self._size
        self._ops = context.ops
        self._group = context.group
        self._activation: PlainActivation = activation
        self._deviations = deviations
        self._gate_up = ColumnLinear(context, parts, hidden_size)
        self._down = RowLinear(context, f"{name}.down_proj", intermediate_size, hidden_size, shard._replace(dim=1))

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        gate_up = self._gate_up(x)
        gates = gate_up[:, : self._size]
        whole = gates if self._group.size == 1 else self._group.all_gather(gates.contiguous(), dim=-1)
        self._ops.residual_streams.keep_outliers(gates, whole, self._deviations)
        return self._down(self._ops.activate_and_mul(gate_up, self._activation))


class MLP:
    """Computes `down(activation(up(x)))`.

    Attributes:
        activation_size: values that the layer computes for each token.
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
        self._activation = activation
        self._up = ColumnLinear(
            context, [LinearPart(f"{name}.up_proj", intermediate_size, shard)], hidden_size, bias=bias
        )
        self._down = RowLinear(
            context, f"{name}.down_proj", intermediate_size, hidden_size, Shard(1, shard.start, shard.stop), bias=bias
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] → [num_tokens, hidden]."""
        return self._down(self._up(x, self._activation))

    def partial(self, x: Tensor) -> Tensor:
        """Computes the rank's part of the outputs; their sum over ranks is the result of `__call__`."""
        return self._down.partial(self._up(x, self._activation))

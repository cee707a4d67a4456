"""Parts of recurrent layers: their interface, the convolution before a scan, and readers of their parameters."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quire.executor.layers.attention.grouped_query import LayerPlace
from quire.executor.layers.context import ModelContext
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.recurrent import StateRows


class RecurrentLayer(ABC):
    """A layer that mixes the tokens of a sequence through a state.

    Attributes:
        state: kept of a sequence, on this rank.
        activation_size: values that the layer computes for each token.
    """

    state: LayerState
    activation_size: int

    def __init__(self, context: ModelContext, place: LayerPlace) -> None:
        self._ops = context.ops
        self._place = place

    @abstractmethod
    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """`x` [num_tokens, hidden] → [num_outputs, hidden], for the tokens that `outputs_of` selects."""

    def outputs_of(self, rows: Tensor, step: StepContext) -> Tensor:
        """Selects the `rows` [num_tokens, size] of tokens with an output: all, or in the last layer the wanted ones."""
        if self._place.is_last and step.wanted is not None:
            return self._ops.take_rows(rows, step.wanted.tokens)
        return rows


class CausalConv1d:
    """A convolution of each channel over its last tokens.

    Attributes:
        size: this rank's channels.
        state_shape: of the state, the inputs of a sequence's last tokens.
    """

    def __init__(
        self,
        context: ModelContext,
        parts: Sequence[LinearPart],
        width: int,
        *,
        bias: bool = False,
        activation: Literal["silu"] | None = "silu",
        dilation: int = 1,
    ) -> None:
        """Takes as `parts` the rank's channels of the checkpoint's convolutions, in the order of the inputs.

        The convolution sees every `dilation`-th token. It is computed over `(width - 1) * dilation + 1` tokens, with
        zeros for the other weights.
        """
        weights = [context.read(f"{part.name}.weight", (part.out_features, 1, width), part.shard) for part in parts]
        self._ops = context.ops
        self._weight = torch.cat(weights).flatten(1).T.contiguous()
        if dilation > 1:
            own = self._weight
            self._weight = own.new_zeros((width - 1) * dilation + 1, own.shape[1])
            self._weight[::dilation] = own
        self._bias: Tensor | None = None
        if bias:
            self._bias = torch.cat(
                [context.read(f"{part.name}.bias", (part.out_features,), part.shard) for part in parts]
            )
        self._activation = activation
        self.size = self._weight.shape[1]
        self.state_shape = (len(self._weight) - 1, self.size)

    def __call__(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """`x` [num_tokens, size] → [num_tokens, size]; `state` [num_slots, *state_shape] is overwritten."""
        return self._ops.recurrent.causal_conv1d(x, self._weight, self._bias, state, rows, activation=self._activation)


def within(shard: Shard, offset: int) -> Shard:
    """Returns the same rows of a tensor in which those of `shard` begin at `offset`."""
    return Shard(shard.dim, offset + shard.start, offset + shard.stop)


def parts_of(name: str, shards: Sequence[Shard], out_features: int) -> list[LinearPart]:
    """Lists some rows of one layer, as parts of a fused one."""
    return [LinearPart(name, out_features, shard) for shard in shards]


def read_decay(context: ModelContext, name: str, shape: tuple[int, ...], shard: Shard) -> Tensor:
    """Reads the rank's part of `-exp(A_log)`, float32, for scans."""
    return context.read(name, shape, shard, torch.float32).exp_().neg_()

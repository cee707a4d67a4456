"""What adapters add to the products of experts: low-rank products of each choice, by adapter and expert."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.eager.experts import GroupedExperts
from quire.ops.experts import ExpertCall
from quire.ops.linear import LowRankWeights
from quire.ops.quantized import QuantizedWeight


class AdaptedChoices(NamedTuple):
    """The choices of a step with adapters of experts.

    Attributes:
        inputs: [num_choices, hidden], of the first layer.
        numbers: [num_choices] int64; of each choice's low-rank weights, or -1 for none.
        add: `Backend.add_low_rank`.
    """

    inputs: Tensor
    numbers: Tensor
    add: Callable[[Tensor, Tensor, LowRankWeights, Tensor], Tensor]

    @classmethod
    def of(
        cls, call: ExpertCall, num_experts: int, add: Callable[[Tensor, Tensor, LowRankWeights, Tensor], Tensor]
    ) -> "AdaptedChoices":
        """The choices of a call that has adapters."""
        assert call.low_rank is not None
        inputs, adapters = call.x.repeat_interleave(call.ids.shape[1], 0), call.low_rank.adapters.unsqueeze(1)
        if call.weighs_inputs:
            inputs = (inputs * call.weights.flatten().unsqueeze(1)).to(inputs.dtype)
        numbers = torch.where((call.ids >= 0) & (adapters >= 0), adapters * num_experts + call.ids, -1)
        return cls(inputs, numbers.flatten(), add)

    def added(self, x: Tensor, out: Tensor, weights: LowRankWeights) -> Tensor:
        """Adds the products of `x` [num_choices, in or more] to `out`, whose layers may end with padding."""
        count, size = len(weights.sizes), weights.sizes[0]
        x, parts = x[:, : weights.a.shape[2]], out.view(len(out), count, -1)
        if size == parts.shape[2]:
            return self.add(x, out, weights, self.numbers)
        own = self.add(x, parts[:, :, :size].flatten(1), weights, self.numbers).view(len(out), count, size)
        return torch.cat((own, parts[:, :, size:]), dim=2).flatten(1)


def takes_adapters(packed: GroupedExperts) -> bool:
    """Returns True if gates, ups and biases lie where products without an activation expect them."""
    layers = [layer for layer in (packed.gate_up, packed.up, packed.down) if layer is not None]
    return all(
        layer.bias is None or not isinstance(layer.weight, QuantizedWeight)
        or layer.weight.codes.shape[1] == layer.shape[0]
        for layer in layers
    )  # fmt: skip

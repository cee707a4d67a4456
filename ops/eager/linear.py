"""Linear layers in plain torch."""

import torch.nn.functional as F
from torch import Tensor

from quire.ops.eager.elementwise import silu_and_mul

PackedWeight = tuple[Tensor, Tensor | None]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Weight and bias as they are."""
    return weight, bias


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """`x @ weight.T + bias`."""
    return F.linear(x, *packed)


pack_gated_linear = pack_linear


def gated_linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """`silu(gate) * up` of [gate | up] = `x @ weight.T + bias`."""
    return silu_and_mul(linear(x, packed))

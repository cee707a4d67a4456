"""Linear layers in plain torch."""

import torch.nn.functional as F
from torch import Tensor

PackedWeight = tuple[Tensor, Tensor | None]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Weight and bias as they are."""
    return weight, bias


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """`x @ weight.T + bias`."""
    return F.linear(x, *packed)

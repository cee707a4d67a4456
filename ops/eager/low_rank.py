"""Products with the low-rank weights of adapters, in plain torch."""

import torch
from torch import Tensor

from quire.ops.eager.quantized import PART
from quire.ops.linear import LowRankWeights


def add_low_rank(x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
    """Computes `Backend.add_low_rank`, in place.

    Each token is multiplied with the weights of all adapters, and the products with others than its own become zeros.
    So no size depends on the adapters of a step. Some tokens go after others, so that the products have a bounded size.
    """
    num_adapters, inner_size, _ = weights.a.shape
    count = max(1, PART // (num_adapters * inner_size))
    for first in range(0, len(x), count):
        part = slice(first, first + count)
        _add(x[part], out[part], weights, adapters[part])
    return out


def _add(x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> None:
    a, b, sizes = weights.a, weights.b, weights.sizes
    num_tokens, (num_adapters, inner_size, in_features) = len(x), a.shape
    inner = (x @ a.view(-1, in_features).T).view(num_tokens, num_adapters, inner_size)
    is_own = adapters.unsqueeze(1) == torch.arange(num_adapters, device=x.device)
    inner.masked_fill_(~is_own.unsqueeze(2), 0)
    parts = [
        own.reshape(num_tokens, -1) @ columns.reshape(-1, columns.shape[-1])
        for own, columns in zip(inner.chunk(len(sizes), dim=2), b.split(sizes, dim=2), strict=True)
    ]
    products = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if weights.factors is None or weights.shifts is None:
        out.add_(products)
        return
    own = adapters.clamp(min=0)
    changed = (out.float() + products) * weights.factors[own] + weights.shifts[own]
    out.copy_(torch.where(adapters.unsqueeze(1) >= 0, changed, out.float()))

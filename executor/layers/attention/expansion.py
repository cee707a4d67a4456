"""The layer of latent attention that expands latents into the keys and values of all heads, as factors of queries and
outputs (arXiv:2405.04434, section 2.1), and its adapters.

A key is `(K + b_k a) latent` and a value `(V + b_v a) latent`, where all of a sequence's tokens have one adapter. So a
query meets `(K + b_k a)^T q`, and an output is `(V + b_v a)` times the weighted sum of latents.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.executor.layers.adapted import base_layers
from quire.executor.layers.adapters import Adapters, LayerAdapters
from quire.executor.layers.context import ModelContext
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard
from quire.ops.backend import Backend
from quire.ops.eager.quantized import PART
from quire.ops.linear import LowRankWeights


class LatentExpansion:
    """A rank's heads of the expansion.

    Attributes:
        to_latent: [heads, size of a key, rank], in the model's dtype.
        to_values: [heads, rank, size of a value].
    """

    def __init__(
        self, ops: Backend, to_latent: Tensor, to_values: Tensor, adapters: "ExpansionAdapters | None"
    ) -> None:
        self._ops = ops
        self.to_latent = to_latent
        self.to_values = to_values
        self._adapters = adapters

    @classmethod
    def read(
        cls, context: ModelContext, part: LinearPart, rank: int, key_size: int, value_size: int
    ) -> "LatentExpansion":
        """Reads it from one layer, whose outputs are each head's key and value."""
        weight = context.read_dequantized(part, rank)
        keys, values = weight.view(-1, key_size + value_size, rank).split((key_size, value_size), dim=1)
        to_latent, to_values = keys.contiguous(), values.transpose(1, 2).contiguous()
        return cls(context.ops, to_latent, to_values, ExpansionAdapters.of(context, part, rank, key_size))

    @property
    def rank(self) -> int:
        """Elements of a latent."""
        return self.to_latent.shape[2]

    @property
    def size(self) -> int:
        """Elements of all heads' keys and values."""
        return len(self.to_latent) * (self.to_latent.shape[1] + self.to_values.shape[2])

    @property
    def adapters(self) -> Sequence[LayerAdapters]:
        """The place of adapters."""
        return [] if self._adapters is None else [self._adapters.layer]

    def on_queries(self, q: Tensor) -> Tensor:
        """Maps queries [num_rows, heads, size of a key] to those that meet latents, [num_rows, heads, rank]."""
        out = self._ops.latent.head_linear(q, self.to_latent)
        return out if self._adapters is None else self._adapters.add_to_queries(q, out)

    def on_outputs(self, x: Tensor) -> Tensor:
        """Maps weighted latents [num_rows, heads, rank] to outputs [num_rows, heads, size of a value]."""
        out = self._ops.latent.head_linear(x, self.to_values)
        return out if self._adapters is None else self._adapters.add_to_outputs(x, out)


class ExpansionAdapters:
    """The low-rank weights that adapters add to an expansion.

    Their products are plain torch, in sizes that do not depend on the adapters of a step. So a CPU records no step with
    adapters once one of them has such weights.

    Attributes:
        layer: the expansion among the layers that take adapters.
    """

    def __init__(self, context: ModelContext, place: Adapters, part: LinearPart, rank: int, key_size: int) -> None:
        """Takes as `part` the rank's heads of the layer."""
        size = part.shard.stop - part.shard.start
        num_adapters, most = place.limits.num_adapters, place.limits.max_rank
        a, b = place.zeros(num_adapters, most, rank), place.zeros(num_adapters, most, size)
        [base] = base_layers(context, [part], rank, bias=False)
        self.layer = LayerAdapters(
            place,
            [base._replace(meets_past=True)],
            [Shard(1, 0, rank)],
            [size],
            has_bias=False,
            weights=LowRankWeights(a, b, (size,), None),
        )
        place.layers.append(self.layer)
        self._place = place
        self._a = a
        self._b = b
        self._key_size = key_size

    @classmethod
    def of(cls, context: ModelContext, part: LinearPart, rank: int, key_size: int) -> "ExpansionAdapters | None":
        """Returns None if the layer takes no adapters."""
        place = context.adapters
        return None if place is None or not place.takes(part.name) else cls(context, place, part, rank, key_size)

    def add_to_queries(self, q: Tensor, out: Tensor) -> Tensor:
        """Adds the adapters' part of `LatentExpansion.on_queries` to `out`."""
        if not self._is_active:
            return out
        b = self._heads(out.shape[1])[..., : self._key_size]
        own, sums = self._is_own(q), torch.empty_like(out)
        for part in self._parts(out):
            inner = torch.einsum("thd,nrhd->thnr", q[part], b).masked_fill_(~own[part], 0)
            sums[part] = out[part] + (inner.flatten(2) @ self._a.flatten(0, 1)).view_as(out[part])
        return sums

    def add_to_outputs(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds the adapters' part of `LatentExpansion.on_outputs` to `out`."""
        if not self._is_active:
            return out
        b = self._heads(out.shape[1])[..., self._key_size :]
        own, sums = self._is_own(x), torch.empty_like(out)
        for part in self._parts(out):
            inner = torch.einsum("thk,nrk->thnr", x[part], self._a).masked_fill_(~own[part], 0)
            sums[part] = out[part] + torch.einsum("thnr,nrhv->thv", inner, b)
        return sums

    def _parts(self, out: Tensor) -> Iterator[slice]:
        """Yields tokens whose products with all adapters have a bounded size."""
        count = max(1, PART // (out.shape[1] * self._a.shape[0] * self._a.shape[1]))
        return (slice(first, first + count) for first in range(0, len(out), count))

    @property
    def _is_active(self) -> bool:
        return self.layer.is_used and self._place.is_active

    def _heads(self, num_heads: int) -> Tensor:
        """Returns B as [adapters, rank, heads, size of a key and a value]."""
        return self._b.unflatten(2, (num_heads, -1))

    def _is_own(self, x: Tensor) -> Tensor:
        """Returns True for the adapter of each row of `x`, [num_rows, 1, adapters, 1]."""
        numbers = torch.arange(len(self._a), device=x.device)
        return (self._place.tokens(len(x)).unsqueeze(1) == numbers)[:, None, :, None]

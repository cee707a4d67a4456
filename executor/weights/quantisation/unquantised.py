"""Weights without quantisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.executor.weights.quantisation.scheme import Part
from quire.executor.weights.readers import TensorSource


class Unquantised:
    """See `LinearScheme`. One tensor a layer, `weight`, in the model's dtype."""

    def read_weight(self, source: TensorSource, parts: Sequence[Part], in_features: int) -> Tensor:
        weights = [source.read(f"{name}.weight", (out, in_features), shard) for name, out, shard in parts]
        return weights[0] if len(parts) == 1 else torch.cat(weights)

    def read_numbers(self, source: TensorSource, part: Part, in_features: int, dtype: torch.dtype) -> Tensor:
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard, dtype)

    def head_weight(self, source: TensorSource, part: Part, in_features: int, rows: Tensor) -> Tensor:
        return rows

"""Weights without quantisation."""

import torch
from torch import Tensor

from quire.executor.weights.quantisation.scheme import Part
from quire.executor.weights.readers import TensorSource
from quire.ops.backend import LinearWeight


class Unquantised:
    """See `LinearScheme`. One tensor a layer, `weight`, in the model's dtype."""

    def read_weight(self, source: TensorSource, part: Part, in_features: int) -> Tensor:
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard)

    def read_numbers(self, source: TensorSource, part: Part, in_features: int, dtype: torch.dtype) -> Tensor:
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard, dtype)

    def read_rows(self, source: TensorSource, part: Part, in_features: int) -> Tensor:
        return self.read_weight(source, part, in_features)

    def for_head(self, rows: LinearWeight, part: Part) -> LinearWeight:
        return rows

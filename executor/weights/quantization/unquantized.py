"""Weights without quantization."""

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import TensorSource
from quire.ops.linear import LinearWeight

_SCALES = ("weight_scale", "weight_scale_inv", "scale")
"""The scales of 8-bit codes, in quantized formats."""


class Unquantized:
    """Weights in the model's dtype: one tensor a layer, `weight`."""

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> Tensor:
        stored = source.find(f"{part.name}.weight")
        if stored is not None and stored.dtype.itemsize == 1:
            for kind in _SCALES:
                if source.find(f"{part.name}.{kind}") is not None:
                    raise ModelLoadError(
                        f"{part.name} has a {kind}, and config.json has no quantization_config, which would say what "
                        "it is for. Take the config.json that was written with these weights."
                    )
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard)

    def read_dequantized(self, source: TensorSource, part: LinearPart, in_features: int, dtype: torch.dtype) -> Tensor:
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard, dtype)

    def read_rows(self, source: TensorSource, part: LinearPart, in_features: int) -> Tensor:
        return self.read_weight(source, part, in_features)

    def for_head(self, rows: LinearWeight, part: LinearPart) -> LinearWeight:
        return rows

"""Weights of one byte each, made when a checkpoint of 16 or 32 bits is loaded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.executor.weights.quantisation.scheme import Part, TensorSource
from quire.ops.backend import Int8Weight

_LARGEST = 127
_PART = 1 << 22
"""The most numbers of a weight that are converted to float32 at once."""


class Int8:
    """See `LinearScheme`. Only weights are rounded, symmetrically around zero, with a float32 scale for each output.

    A scale depends on all inputs of its output. A rank that holds some of the inputs therefore reads whole rows and
    keeps its part of them. So all ranks together hold the numbers that one rank would.

    Each layer is rounded as soon as it is read, so at most one unrounded layer is in memory at a time.
    """

    def read_weight(self, source: TensorSource, parts: Sequence[Part], in_features: int) -> Int8Weight:
        weights = [_read_part(source, part, in_features) for part in parts]
        if len(weights) == 1:
            return weights[0]
        return Int8Weight(*(torch.cat(tensors) for tensors in zip(*weights, strict=True)))


def quantise(weight: Tensor) -> Int8Weight:
    """The nearest numbers to `weight` [out, in]. An output whose scale is NaN or infinite keeps that scale."""
    values = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    if weight.is_meta:
        return Int8Weight(values, scales)
    size = max(1, _PART // weight.shape[1])
    for part, part_values, part_scales in zip(weight.split(size), values.split(size), scales.split(size), strict=True):
        full = part.float()
        part_scales.copy_(torch.linalg.vector_norm(full, torch.inf, dim=1).div_(_LARGEST))
        divisors = part_scales.masked_fill(part_scales == 0, 1)  # a row of zeros
        part_values.copy_((full / divisors.unsqueeze(1)).round_())
    return Int8Weight(values, scales)


def _read_part(source: TensorSource, part: Part, in_features: int) -> Int8Weight:
    name, shape, shard = f"{part.name}.weight", (part.out_features, in_features), part.shard
    if shard.dim == 0:
        return quantise(source.read(name, shape, shard))
    values, scales = quantise(source.read(name, shape))
    return Int8Weight(values[:, shard.start : shard.stop].contiguous(), scales)

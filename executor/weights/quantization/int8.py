"""Rounds weights to one byte each, symmetrically around zero, with a float32 scale for each output."""

import torch
from torch import Tensor

from quire.ops.quantized import QuantizedWeight

_LARGEST = 127
_PART = 1 << 20
"""The most numbers of a weight that are converted to float32 at once. With more, memory is slower than arithmetic."""


def quantize(weight: Tensor) -> QuantizedWeight:
    """The nearest numbers to `weight` [out, in]. An output whose scale is NaN or infinite keeps that scale."""
    codes = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty(len(weight), 1, dtype=torch.float32)
    if weight.is_meta:
        return QuantizedWeight(codes, scales)
    size = max(1, _PART // weight.shape[1])
    for part, part_codes, part_scales in zip(weight.split(size), codes.split(size), scales.split(size), strict=True):
        full = part.float()
        largest = full.abs().amax(1, keepdim=True)  # `vector_norm` takes fifteen times as long
        part_scales.copy_(largest.div_(_LARGEST))
        divisors = part_scales.masked_fill(part_scales == 0, 1)  # a row of zeros
        part_codes.copy_((full / divisors).round_())
    return QuantizedWeight(codes, scales)

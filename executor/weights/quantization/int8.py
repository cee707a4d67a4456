"""Rounds weights to int8, symmetrically around zero, with a float32 scale for each output."""

import torch
from torch import Tensor

from quire.ops.quantized import QuantizedWeight

_LARGEST = 127
_PART = 1 << 20
"""The most elements that are converted to float32 at once. With more, memory bandwidth limits the speed."""


def quantize(weight: Tensor) -> QuantizedWeight:
    """Rounds `weight` [out, in] to the nearest int8 values. An output with a NaN or infinite scale keeps it."""
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

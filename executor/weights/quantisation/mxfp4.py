"""MXFP4: blocks of 32 numbers of four bits with one scale (OCP Microscaling Formats, version 1.0)."""

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that share a scale."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7 (E2M1); the codes 8 to 15 are their negatives."""
_BIAS, _NAN = 127, 255
"""Of the scales (E8M0), which are powers of two."""


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `blocks` [..., num_blocks, 16] uint8 with `scales` [..., num_blocks] uint8, in `dtype`.

    Returns [..., num_blocks * 32]. The lower half of a byte comes before its upper half.
    """
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK)
    if blocks.is_meta:
        return blocks.new_empty(shape, dtype=dtype)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=blocks.device)
    factors = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - _BIAS)
    factors = factors.masked_fill(scales == _NAN, torch.nan)
    return (values[codes] * factors.unsqueeze(-1)).to(dtype).reshape(shape)

"""How the keys and values of one token and head lie in a KV cache of few bits: a row of codes, then their scale.

number = value(code) * scale, where the scale maps a row's greatest magnitude to the greatest code. A scale of its own
for each token and head needs no calibration, and a row never changes once it is written. Where a checkpoint was
calibrated, each row of a head has that head's scale, so that its codes are those that the checkpoint's makers measured.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
"""Of a row's scale, float32, after its codes."""

LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 7.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The greatest value of a code, by the type of the cache. In uint8 lie two codes of four bits in two's complement, the
lower half first."""

_SMALLEST = 1e-30
"""A row of smaller numbers is a row of zeros, so that the inverse of its scale is finite."""


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row of `head_dim` numbers in a cache of `dtype`.

    Raises:
        ValueError: codes of four bits cannot hold an odd number of numbers.
    """
    if dtype not in LARGEST_CODE:
        return head_dim
    if dtype != torch.uint8:
        return head_dim + SCALE_BYTES
    if head_dim % 2:
        raise ValueError(f"a KV cache of four bits takes heads of an even size, got {head_dim}; use one of eight bits.")
    return head_dim // 2 + SCALE_BYTES


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the numbers that are read from a cache of `dtype`."""
    return torch.float32 if dtype in LARGEST_CODE else dtype


def in_octets(rows: Tensor) -> Tensor:
    """`rows` of codes as uint8, because torch does not index numbers of eight bits; other rows as they are."""
    return rows.view(torch.uint8) if rows.dtype in LARGEST_CODE else rows


def encode(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> Tensor:
    """`x` [..., head_dim], finite, as rows [..., row_size] of a cache of `dtype`.

    With the scales `fixed`, which broadcast to [..., 1], numbers beyond the greatest code are clamped to it.
    """
    if dtype not in LARGEST_CODE:
        return x.to(dtype)
    full, most_code = x.float(), LARGEST_CODE[dtype]
    if fixed is not None:
        scales = fixed.expand(*x.shape[:-1], 1).contiguous()
        values = (full / scales).clamp(-most_code, most_code)
    else:
        most = full.abs().amax(dim=-1, keepdim=True)
        is_empty = most < _SMALLEST
        scales = (most / most_code).masked_fill(is_empty, 0)
        values = full * (most_code / most).masked_fill(is_empty, 0)
    if dtype.is_floating_point:
        codes = values.to(dtype).view(torch.uint8)
    else:
        codes = values.round().to(torch.int8).view(torch.uint8)
    if dtype == torch.uint8:
        codes = codes[..., ::2] & 15 | codes[..., 1::2] << 4
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1).view(dtype)


def decode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `rows` [..., row_size], as `encode` made them, in `dtype`: [..., head_dim]."""
    if rows.dtype not in LARGEST_CODE:
        return rows.to(dtype)
    codes, scales = rows.view(torch.uint8).split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    if rows.dtype == torch.uint8:
        signed = torch.stack((codes << 4, codes & 0xF0), dim=-1).flatten(-2).view(torch.int8) >> 4
    else:
        signed = codes.contiguous().view(rows.dtype)
    return (signed.float() * scales.contiguous().view(torch.float32)).to(dtype)

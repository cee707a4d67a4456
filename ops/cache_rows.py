"""How numbers of one token lie in a cache of few bits: a row of codes, then their scale.

A row is the key or the value of a head, or a part of what latent attention keeps of a token (`quire.ops.latent`).
number = value(code) * scale, where the scale maps a row's greatest magnitude to the greatest code. A scale of its own
for each row needs no calibration, and a row never changes once it is written. Where a checkpoint was
calibrated, each row of a head has that head's scale, so that its codes are those that the checkpoint's makers measured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SCALE_BYTES = 4
"""Of a row's scale, float32, after its codes."""

LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 7.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The greatest value of a code, by the type of the cache. In uint8 lie two codes of four bits in two's complement, the
lower half first."""

LARGEST = 1e18
"""The cache holds this instead of infinity: its product with a query is still finite in float32."""

_SMALLEST = 1e-30
"""A row of smaller numbers is a row of zeros, so that the inverse of its scale is finite."""


def row_size(size: int, dtype: torch.dtype) -> int:
    """Elements of a row of `size` numbers in a cache of `dtype`; codes have a scale even for none.

    Raises:
        ValueError: codes of four bits cannot hold an odd number of numbers.
    """
    if dtype not in LARGEST_CODE:
        return size
    if dtype != torch.uint8:
        return size + SCALE_BYTES
    if size % 2:
        raise ValueError(
            f"a KV cache of four bits takes heads and latents of an even size, got {size}; use one of eight bits."
        )
    return size // 2 + SCALE_BYTES


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the numbers that are read from a cache of `dtype`."""
    return torch.float32 if dtype in LARGEST_CODE else dtype


def decoded_bytes(size: int, cache_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes of `size` numbers that are read from a cache of `cache_dtype` as `dtype`, in the larger type on the way."""
    return size * max(plain_dtype(cache_dtype).itemsize, dtype.itemsize)


def largest_stored(cache_dtype: torch.dtype) -> float:
    """The number that a cache of this dtype holds instead of infinity."""
    return LARGEST if cache_dtype in LARGEST_CODE else min(LARGEST, torch.finfo(cache_dtype).max)


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
        most = full.abs().amax(dim=-1, keepdim=True) if full.shape[-1] else full.sum(dim=-1, keepdim=True)
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
    """The numbers of `rows` [..., row_size], as `encode` made them, in `dtype`: [..., head_dim].

    Bytes that it did not make may give infinities and NaN.
    """
    if rows.dtype not in LARGEST_CODE:
        return rows.to(dtype)
    codes, scales = rows.view(torch.uint8).split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    if rows.dtype == torch.uint8:
        signed = torch.stack((codes << 4, codes & 0xF0), dim=-1).flatten(-2).view(torch.int8) >> 4
    else:
        signed = codes.contiguous().view(rows.dtype)
    # A copy, because the bytes of a scale may lie anywhere.
    numbers = signed.float().mul_(scales.clone(memory_format=torch.contiguous_format).view(torch.float32))
    if dtype == torch.float16:
        numbers.clamp_(-65504, 65504)  # a code may be greater than the number that was rounded to it
    return numbers.to(dtype)


def gather(cache: Tensor, slots: Tensor) -> Tensor:
    """What lies in `slots` [...] int64 of `cache` [num_pages, block_size, size]: [..., size], of the cache's type."""
    return in_octets(cache)[slots // cache.shape[1], slots % cache.shape[1]].view(cache.dtype)


def split_rows(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of so many numbers each that lie one after the other in `rows` [..., sum of their `row_size`]: views."""
    return list(rows.split([row_size(size, rows.dtype) for size in sizes], dim=-1))


def decode_parts(rows: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The numbers of rows that lie one after the other, as for `split_rows`, side by side: [..., sum of `sizes`]."""
    if rows.dtype not in LARGEST_CODE:
        return rows.to(dtype)
    return torch.cat([decode(part, dtype) for part in split_rows(rows, sizes)], dim=-1)

"""The rows of a quantized cache: a token's quantized values, then their scale.

A row is the key or the value of a head, or a part of a token's latent row (`quire.ops.latent`). An element is
value(code) * scale, where the scale maps a row's greatest magnitude to the greatest code. A separate scale for each row
needs no calibration, and a row never changes once it is written. With a calibrated checkpoint, each row of a head has
that head's scale, so that its codes are those of the checkpoint's makers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SCALE_BYTES = 4
"""Bytes of a row's scale, float32, after its codes."""

LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 7.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The greatest value of a code, by the cache's dtype. uint8 has two 4-bit codes in two's complement, the lower half
first.
"""

LARGEST = 1e18
"""The cache holds this instead of infinity: its product with a query is still finite in float32."""

_SMALLEST = 1e-30
"""A row of smaller magnitudes becomes zeros, so that the inverse of its scale is finite."""


def row_size(size: int, dtype: torch.dtype) -> int:
    """Counts the elements of a row of `size` values in a cache of `dtype`; a quantized row has a scale even if empty.

    Raises:
        ValueError: 4-bit codes need an even size.
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
    """Returns the dtype of the values that are read from a cache of `dtype`."""
    return torch.float32 if dtype in LARGEST_CODE else dtype


def decoded_bytes(size: int, cache_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Counts the bytes of `size` values while they are read from a cache to `dtype`: the larger of the two dtypes."""
    return size * max(plain_dtype(cache_dtype).itemsize, dtype.itemsize)


def largest_stored(cache_dtype: torch.dtype) -> float:
    """Returns the value that a cache of this dtype holds instead of infinity."""
    return LARGEST if cache_dtype in LARGEST_CODE else min(LARGEST, torch.finfo(cache_dtype).max)


def in_octets(rows: Tensor) -> Tensor:
    """Views quantized `rows` as uint8, because torch does not index 8-bit floats; returns other rows unchanged."""
    return rows.view(torch.uint8) if rows.dtype in LARGEST_CODE else rows


def encode(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> Tensor:
    """Quantizes `x` [..., head_dim], finite, to rows [..., row_size] of a cache of `dtype`.

    With the scales `fixed`, which broadcast to [..., 1], values beyond the greatest code are clamped to it.
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
    """Dequantizes `rows` [..., row_size] from `encode` to `dtype`: [..., head_dim].

    Other bytes may give infinities and NaN.
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
    """Reads the rows in `slots` [...] int64 of `cache` [num_pages, block_size, size]: [..., size], in the cache's
    dtype.
    """
    return in_octets(cache)[slots // cache.shape[1], slots % cache.shape[1]].view(cache.dtype)


def split_rows(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Splits `rows` [..., sum of the `row_size`s] into views of one row for each of `sizes`."""
    return list(rows.split([row_size(size, rows.dtype) for size in sizes], dim=-1))


def decode_parts(rows: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantizes rows that lie one after the other, as in `split_rows`, side by side: [..., sum of `sizes`]."""
    if rows.dtype not in LARGEST_CODE:
        return rows.to(dtype)
    return torch.cat([decode(part, dtype) for part in split_rows(rows, sizes)], dim=-1)

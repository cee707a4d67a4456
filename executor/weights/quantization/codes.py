"""Codes of few bits: their values, and how they are taken out of the bytes and words of a checkpoint."""

import functools

import torch
from torch import Tensor

from quire.ops.quantized import QuantizedWeight

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, of MXFP4 and NVFP4 (OCP Microscaling Formats, version 1.0)."""
INT4 = tuple(float(code) for code in range(-8, 8))
"""Codes count from the smallest number."""

PER_WORD = 8
"""Codes of four bits in a word of 32."""

_E8M0_BIAS = 127
_NAN = 255
"""Of scales of E8M0 and of E5M3."""


@functools.cache
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The values of sixteen codes; one tensor for all weights."""
    return torch.tensor(values, device=device)


def powers_of_two(exponents: Tensor) -> Tensor:
    """The scales that E8M0 `exponents` (uint8 or float8_e8m0fnu) stand for, in bfloat16, which holds each exactly."""
    if exponents.is_meta:
        return exponents.new_empty(exponents.shape, dtype=torch.bfloat16)
    exponents = exponents.view(torch.uint8)
    scales = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - _E8M0_BIAS)
    return scales.masked_fill(exponents == _NAN, torch.nan).bfloat16()


def unsigned_e5m3(scales: Tensor) -> Tensor:
    """The float32 that `scales` (uint8) stand for: five bits of exponent and three of mantissa, without a sign."""
    if scales.is_meta:
        return scales.new_empty(scales.shape, dtype=torch.float32)
    exponents, mantissas = (scales >> 3).int(), scales & 7
    eighths = torch.where(exponents > 0, mantissas + 8, mantissas).float()
    return torch.ldexp(eighths, exponents.clamp(min=1) - 18).masked_fill(scales == _NAN, torch.nan)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of `bits` bits in each row of `packed` [..., bytes or int32 words], uint8 [..., count].

    A row is one stream of bits from the lowest bit on, so a code of 3 bits may begin in a word and end in the next.
    """
    *outer, _ = packed.shape
    if packed.is_meta:
        return packed.new_empty((*outer, count), dtype=torch.uint8)
    stream = packed.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        parts = [(stream >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(-2)[..., :count]
    num_bytes = -(-count // 8) * bits  # eight codes fill as many bytes as a code has bits
    stream = torch.nn.functional.pad(stream, (0, max(0, num_bytes - stream.shape[-1])))[..., :num_bytes]
    wide = torch.int32 if bits < 4 else torch.int64
    joined = torch.zeros((*outer, num_bytes // bits), dtype=wide, device=packed.device)
    for index in range(bits):
        joined |= stream[..., index::bits].to(wide) << (8 * index)
    codes = [((joined >> (bits * index)) & ((1 << bits) - 1)).to(torch.uint8) for index in range(8)]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count]


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes of four bits, uint8 [out, in], as two a byte [out, in / 2], the lower half first."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def integers(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None = None,
    input_order: Tensor | None = None,
) -> QuantizedWeight:
    """`(code - zero) * scale` of unsigned codes, uint8 [out, in].

    Args:
        scales: [out, groups] float32, float16 or bfloat16.
        zeros: [out, groups] of any dtype; None: the middle, `2 ** (bits - 1)`.
    """
    if bits > 4:
        signed = (codes ^ 128).view(torch.int8) if bits == 8 else codes.to(torch.int8) - (1 << (bits - 1))
        return integers_around_zero(signed, bits, scales, zeros, input_order)
    return packed_integers(pack_pairs(codes), bits, scales, zeros, input_order)


def packed_integers(
    pairs: Tensor, bits: int, scales: Tensor, zeros: Tensor | None = None, input_order: Tensor | None = None
) -> QuantizedWeight:
    """See `integers`; of codes that are packed already, [out, in / 2]."""
    middle = 1 << (bits - 1)
    values = table(tuple(float(code - middle) for code in range(16)), pairs.device)
    return QuantizedWeight(pairs, *_scaled(scales, zeros, middle, values), input_order)


def integers_around_zero(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None = None, input_order: Tensor | None = None
) -> QuantizedWeight:
    """See `integers`; codes are int8 [out, in], from which the middle has been taken. `zeros` are as before that."""
    return QuantizedWeight(codes, *_scaled(scales, zeros, 1 << (bits - 1), None), input_order)


def _scaled(
    scales: Tensor, zeros: Tensor | None, middle: int, values: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales, table and offsets."""
    if zeros is None:
        return scales, values, None
    scales = scales.float()  # a product of scale and zero point needs more digits than either
    return scales, values, (middle - zeros.float()) * scales

"""Low-bit codes: their values, and how to unpack them from the bytes and words of a checkpoint."""

import functools

import torch
from torch import Tensor

from quire.ops.quantized import QuantizedWeight

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1, of MXFP4 and NVFP4 (OCP Microscaling Formats, version 1.0)."""
INT4 = tuple(float(code) for code in range(-8, 8))
"""The values of signed int4, whose codes count from -8."""

PER_WORD = 8
"""4-bit codes in a 32-bit word."""

_E8M0_BIAS = 127
_NAN = 255
"""The code of NaN in E8M0 and in unsigned E5M3."""


@functools.cache
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns the values of sixteen codes; one tensor serves all weights."""
    return torch.tensor(values, device=device)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Decodes E8M0 `exponents` (uint8 or float8_e8m0fnu) to scales in bfloat16, which represents each exactly."""
    if exponents.is_meta:
        return exponents.new_empty(exponents.shape, dtype=torch.bfloat16)
    exponents = exponents.view(torch.uint8)
    scales = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - _E8M0_BIAS)
    return scales.masked_fill(exponents == _NAN, torch.nan).bfloat16()


def unsigned_e5m3(scales: Tensor) -> Tensor:
    """Decodes `scales` (uint8) to float32: five bits of exponent and three of mantissa, without a sign."""
    if scales.is_meta:
        return scales.new_empty(scales.shape, dtype=torch.float32)
    exponents, mantissas = (scales >> 3).int(), scales & 7
    eighths = torch.where(exponents > 0, mantissas + 8, mantissas).float()
    return torch.ldexp(eighths, exponents.clamp(min=1) - 18).masked_fill(scales == _NAN, torch.nan)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks the first `count` codes of `bits` bits in each row of `packed` [..., bytes or int32 words]: uint8 [...,
    count].

    A row is one stream of bits from the lowest bit on, so a 3-bit code may begin in a word and end in the next.
    """
    *outer, _ = packed.shape
    if packed.is_meta:
        return packed.new_empty((*outer, count), dtype=torch.uint8)
    stream = packed.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        parts = [(stream >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(-2)[..., :count]
    num_bytes = -(-count // 8) * bits  # eight codes of n bits fill n bytes
    stream = torch.nn.functional.pad(stream, (0, max(0, num_bytes - stream.shape[-1])))[..., :num_bytes]
    wide = torch.int32 if bits < 4 else torch.int64
    joined = torch.zeros((*outer, num_bytes // bits), dtype=wide, device=packed.device)
    for index in range(bits):
        joined |= stream[..., index::bits].to(wide) << (8 * index)
    codes = [((joined >> (bits * index)) & ((1 << bits) - 1)).to(torch.uint8) for index in range(8)]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count]


def pack_pairs(codes: Tensor) -> Tensor:
    """Packs 4-bit codes, uint8 [out, in], as two a byte [out, in / 2], the lower half first."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def integers(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None = None,
    input_order: Tensor | None = None,
) -> QuantizedWeight:
    """Builds the weight `(code - zero) * scale` from unsigned codes, uint8 [out, in].

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
    """Builds the weight of `integers` from 4-bit codes that are packed already, [out, in / 2]."""
    middle = 1 << (bits - 1)
    values = table(tuple(float(code - middle) for code in range(16)), pairs.device)
    return QuantizedWeight(pairs, *_scaled(scales, zeros, middle, values), input_order)


def integers_around_zero(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None = None, input_order: Tensor | None = None
) -> QuantizedWeight:
    """Builds the weight of `integers` from int8 codes [out, in] from which the middle has been subtracted.

    `zeros` are those from before the subtraction.
    """
    return QuantizedWeight(codes, *_scaled(scales, zeros, 1 << (bits - 1), None), input_order)


def _scaled(
    scales: Tensor, zeros: Tensor | None, middle: int, values: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns scales, table and offsets."""
    if zeros is None:
        return scales, values, None
    scales = scales.float()  # a product of scale and zero point needs more digits than either
    return scales, values, (middle - zeros.float()) * scales

"""Unpacks the blocks of GGUF files (ggml's `ggml-common.h`, `ggml-quants.c`) to codes, scales and offsets.

A block is the bytes of 32 or 256 neighbouring inputs of an output. Its values are `scale * code + offset`. In the "K"
formats, a block's scales are small integers times one float16. `unpack` returns those products in float32, where they
are exact, so that `dequantize` equals the `gguf` package to the last bit. `with_short_scales` rounds them as the files'
makers rounded that one float16.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import INT4, pack_pairs, table
from quire.ops.quantized import QuantizedWeight

_UNSIGNED = tuple(float(value) for value in range(16))
_NON_LINEAR = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
_E2M1 = tuple(map(float, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)))
"""Twice the values of MXFP4, as in ggml; the scales are half of MXFP4's."""


class UnpackedForm(NamedTuple):
    """The form of the `QuantizedWeight` that a format's blocks become.

    Attributes:
        table: the values of 4-bit codes; None: 8-bit codes, each its own value.
        group_size: inputs that share a scale.
    """

    table: tuple[float, ...] | None
    group_size: int
    scales: torch.dtype
    has_offsets: bool = False


class _Parts(NamedTuple):
    """Parts of [rows, num_blocks] blocks: codes [rows, num_blocks, values] and scales [rows, num_blocks, groups]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


class BlockFormat(NamedTuple):
    """A format of blocks.

    Attributes:
        numbers: of values in a block.
        size: of a block, in bytes.
        layout: of the weights that its blocks become.
        unpack: blocks [rows, num_blocks, size] uint8 → their parts. Codes are indices into the layout's table, or
            values of their own.
    """

    numbers: int
    size: int
    layout: UnpackedForm
    unpack: Callable[[Tensor], _Parts]


def unpack(blocks: Tensor, form: BlockFormat, in_features: int) -> QuantizedWeight:
    """Unpacks the weight [out, in] whose blocks are `blocks` [out, bytes] uint8.

    Kernels may quantize activations to 8 bits for it, as ggml's do (`vec_dot_type` of its types, ggml-cpu.c).
    """
    out, layout = len(blocks), form.layout
    values = None if layout.table is None else table(layout.table, blocks.device)
    if blocks.is_meta:
        scales = blocks.new_empty((out, in_features // layout.group_size), dtype=layout.scales)
        size, dtype = (in_features, torch.int8) if values is None else (in_features // 2, torch.uint8)
        offsets = torch.empty_like(scales) if layout.has_offsets else None
        codes = blocks.new_empty((out, size), dtype=dtype)
        return QuantizedWeight(codes, scales, values, offsets, has_byte_inputs=True)
    codes, scales, offsets = form.unpack(blocks.view(out, -1, form.size))
    codes, flat_offsets = codes.reshape(out, -1), None if offsets is None else _flat(offsets)
    if values is None:
        return QuantizedWeight(codes.to(torch.int8), _flat(scales), None, flat_offsets, has_byte_inputs=True)
    codes = pack_pairs(codes.to(torch.uint8))
    return QuantizedWeight(codes, _flat(scales), values, flat_offsets, has_byte_inputs=True)


def with_short_scales(weight: QuantizedWeight, name: str) -> QuantizedWeight:
    """Rounds float32 scales and offsets to float16: Q4_K then takes 5 bits a value instead of 6.

    They are products of a float16 and an integer. Rounding them to float16 moves them by no more than the rounding of
    that float16 did.

    Raises:
        ModelLoadError: a scale or an offset of the layer `name` is too large for float16.
    """
    if weight.scales.dtype != torch.float32:
        return weight
    scales, offsets = weight.scales.half(), None if weight.offsets is None else weight.offsets.half()
    for numbers in (scales, offsets):
        if numbers is not None and not numbers.is_meta and numbers.isinf().any():
            raise ModelLoadError(
                f"{name}: scales of its blocks are beyond float16's largest number, 65504. Serve the file with "
                "--dtype float32, if it is not damaged."
            )
    return weight._replace(scales=scales, offsets=offsets)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1).contiguous()


def _half(blocks: Tensor, first: int) -> Tensor:
    """Reads the float16 at byte `first` of each block, [rows, num_blocks, 1]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16)


def _fields(packed: Tensor, width: int, count: int, run: int) -> Tensor:
    """Extracts `count` fields of `width` bits of each byte: first the lowest of `run` bytes, then the next ones, then
    of the next `run` bytes.
    """
    shifts = torch.arange(count, dtype=torch.uint8, device=packed.device).mul_(width).view(-1, 1)
    runs = packed.unflatten(-1, (-1, 1, run))
    return ((runs >> shifts) & (2**width - 1)).flatten(-3)


# --------------------------------------------------------------------------------------------------- blocks of 32


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_fields(blocks[..., 2:], 4, 2, 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_fields(blocks[..., 4:], 4, 2, 16), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Unpacks the 32 bits of four bytes, lowest first, as 0 or 16."""
    return _fields(packed, 1, 8, 1) << 4


def _q5_0(blocks: Tensor) -> _Parts:
    codes = _fields(blocks[..., 6:], 4, 2, 16) | _fifth_bits(blocks[..., 2:6])
    return _Parts(codes.to(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Parts:
    codes = _fields(blocks[..., 8:], 4, 2, 16) | _fifth_bits(blocks[..., 4:8])
    return _Parts(codes, _half(blocks, 0), _half(blocks, 2))


def _mxfp4(blocks: Tensor) -> _Parts:
    exponents = blocks[..., :1].int() - 128  # half the scale, because the table's values are doubled
    scales = torch.ldexp(torch.ones(exponents.shape, device=blocks.device), exponents)
    return _Parts(_fields(blocks[..., 1:], 4, 2, 16), scales.bfloat16())


# -------------------------------------------------------------------------------------------------- blocks of 256


def _q2_k(blocks: Tensor) -> _Parts:
    scales, d, d_min = blocks[..., :16], _half(blocks, 80).float(), _half(blocks, 82).float()
    return _Parts(_fields(blocks[..., 16:80], 2, 4, 32), d * (scales & 15), -(d_min * (scales >> 4)))


def _q3_k(blocks: Tensor) -> _Parts:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    scales = _fields(low, 4, 2, 8) | (_fields(high, 2, 4, 4) << 4)
    # A set bit means 0, a clear one -4. Adding 8, the code of 0 in the table, makes that + 8 or + 4.
    codes = _fields(blocks[..., 32:96], 2, 4, 32) + (_fields(blocks[..., :32], 1, 8, 32) << 2) + 4
    return _Parts(codes, _half(blocks, 108).float() * (scales.int() - 32))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks scales and offsets of Q4_K and Q5_K, [rows, num_blocks, 8]: six bits of each in the bytes 4 to 15."""
    scales, mins, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales, mins = (
        torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), dim=-1),
        torch.cat((mins & 63, (rest >> 4) | ((mins >> 2) & 48)), dim=-1),
    )
    return _half(blocks, 0).float() * scales, -(_half(blocks, 2).float() * mins)


def _q4_k(blocks: Tensor) -> _Parts:
    return _Parts(_fields(blocks[..., 16:], 4, 2, 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> _Parts:
    codes = _fields(blocks[..., 48:], 4, 2, 32) | (_fields(blocks[..., 16:48], 1, 8, 32) << 4)
    return _Parts(codes, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> _Parts:
    codes = _fields(blocks[..., :128], 4, 2, 64) | (_fields(blocks[..., 128:192], 2, 4, 32) << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Parts(codes.to(torch.int8) - 32, _half(blocks, 208).float() * scales)


def _iq4_xs(blocks: Tensor) -> _Parts:
    high = blocks[..., 2:4]
    scales = _fields(blocks[..., 4:8], 4, 2, 1) | (_fields(high, 2, 4, 1) << 4)
    return _Parts(_fields(blocks[..., 8:], 4, 2, 16), _half(blocks, 0).float() * (scales.int() - 32))


FORMATS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, UnpackedForm(INT4, 32, torch.float16), _q4_0),
    "Q4_1": BlockFormat(32, 20, UnpackedForm(_UNSIGNED, 32, torch.float16, has_offsets=True), _q4_1),
    "Q5_0": BlockFormat(32, 22, UnpackedForm(None, 32, torch.float16), _q5_0),
    "Q5_1": BlockFormat(32, 24, UnpackedForm(None, 32, torch.float16, has_offsets=True), _q5_1),
    "Q8_0": BlockFormat(32, 34, UnpackedForm(None, 32, torch.float16), _q8_0),
    "Q2_K": BlockFormat(256, 84, UnpackedForm(_UNSIGNED, 16, torch.float32, has_offsets=True), _q2_k),
    "Q3_K": BlockFormat(256, 110, UnpackedForm(INT4, 16, torch.float32), _q3_k),
    "Q4_K": BlockFormat(256, 144, UnpackedForm(_UNSIGNED, 32, torch.float32, has_offsets=True), _q4_k),
    "Q5_K": BlockFormat(256, 176, UnpackedForm(None, 32, torch.float32, has_offsets=True), _q5_k),
    "Q6_K": BlockFormat(256, 210, UnpackedForm(None, 16, torch.float32), _q6_k),
    "IQ4_NL": BlockFormat(32, 18, UnpackedForm(_NON_LINEAR, 32, torch.float16), _q4_0),
    "IQ4_XS": BlockFormat(256, 136, UnpackedForm(_NON_LINEAR, 32, torch.float32), _iq4_xs),
    "MXFP4": BlockFormat(32, 17, UnpackedForm(_E2M1, 32, torch.bfloat16), _mxfp4),
}
"""ggml's name of a type → its format. Other types of blocks are dequantized."""

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""ggml's name of a type without blocks → its dtype."""

"""Operations on each element of rows, and lookups of rows. Each replaces several kernels of plain torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.triton import activations
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import FLOATS, UNIT, USUAL, VECTOR, are_aligned, are_whole
from quire.ops.triton.variants import Variant

_BLOCK = 1024
_HALVES = (32, 64, 128, 256)
"""Halves of rotary sizes that a program has room for; larger ones are left to torch."""

_MOST = 2**31 - 1
"""Numbers that a kernel counts in 32 bits."""


@Kernel
def cap(x_ptr, size, factor, softcap, BLOCK: tl.constexpr):
    """`softcap * tanh(x * factor)`, in place; `size` counts vectors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size * UNIT
    x = tl.load(x_ptr + at, mask=mask).to(tl.float32)
    tl.store(x_ptr + at, (_tanh(x * factor) * softcap).to(x_ptr.dtype.element_ty), mask=mask)


@Kernel
def activate_all(x_ptr, out_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """A plain activation; `size` counts vectors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size * UNIT
    out = activations.activate(tl.load(x_ptr + at, mask=mask).to(tl.float32), ACTIVATION)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def activate_and_mul_rows(
    x_ptr,
    out_ptr,
    size,
    stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of `x` has `size` gates, then as many ups; `size` and `stride` count vectors."""
    row = tl.program_id(0).to(tl.int64)
    columns, size = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), size * UNIT
    mask = columns < size
    gate_at = x_ptr + row * (stride * UNIT) + columns
    gate = tl.load(gate_at, mask=mask).to(tl.float32)
    up = tl.load(gate_at + size, mask=mask).to(tl.float32)
    out = activations.activate_and_mul(gate, up, ACTIVATION)
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def take_scaled_rows(x_ptr, index_ptr, out_ptr, size, stride, scale, BLOCK: tl.constexpr):
    """Rows of `x` at `index`, times `scale`; `size` and `stride` count vectors."""
    row = tl.program_id(0).to(tl.int64)
    columns, size = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), size * UNIT
    mask = columns < size
    start = tl.load(index_ptr + row).to(tl.int64) * (stride * UNIT)
    out = tl.load(x_ptr + start + columns, mask=mask).to(tl.float32) * scale
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def rotation_rows(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, num_tokens, half, scale,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cosines twice, the sines negated and as they are; `half` counts vectors."""
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns, half = tl.arange(0, BLOCK)[None, :], half * UNIT
    mask = (rows < num_tokens) & (columns < half)
    positions = tl.load(positions_ptr + rows, mask=rows < num_tokens, other=0).to(tl.float32)
    angles = positions * tl.load(frequencies_ptr + columns, mask=columns < half, other=0.0)
    cos, sin = (
        (tl.cos(angles) * scale).to(cos_ptr.dtype.element_ty),
        (tl.sin(angles) * scale).to(sin_ptr.dtype.element_ty),
    )
    at = rows.to(tl.int64) * (2 * half) + columns
    tl.store(cos_ptr + at, cos, mask=mask)
    tl.store(cos_ptr + at + half, cos, mask=mask)
    tl.store(sin_ptr + at, -sin, mask=mask)
    tl.store(sin_ptr + at + half, sin, mask=mask)


@Kernel
def rotate_rows(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, heads, half, size, token_stride, head_stride, cos_stride, sin_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates the first `2 * half` numbers of each head and copies the others; all sizes count vectors."""
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    half, size, token = half * UNIT, size * UNIT, (rows // heads).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    is_row = rows < num_rows
    mask = is_row & (columns < half)
    x_at = x_ptr + token * (token_stride * UNIT) + (rows % heads).to(tl.int64) * (head_stride * UNIT) + columns
    cos_at, sin_at = cos_ptr + token * (cos_stride * UNIT) + columns, sin_ptr + token * (sin_stride * UNIT) + columns
    out_at = out_ptr + rows.to(tl.int64) * size + columns
    first, second = _float(x_at, mask), _float(x_at + half, mask)
    low = first * _float(cos_at, mask) + second * _float(sin_at, mask)
    high = second * _float(cos_at + half, mask) + first * _float(sin_at + half, mask)
    tl.store(out_at, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_at + half, high.to(out_ptr.dtype.element_ty), mask=mask)
    for rest in range(2 * half, size, BLOCK):
        more = is_row & (columns + rest < size)
        tl.store(out_at + rest, tl.load(x_at + rest, mask=more), mask=more)


@triton.jit
def _float(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tanh(x):
    """tanh of float32; a series where 1 - exp would lose the digits of small numbers. NaN stays."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2 * tl.abs(x))
    far = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


def scale(x: Tensor, factor: float, softcap: float) -> bool:
    """`Backend.scale` with a cap, in place. False for tensors that the kernel does not take: nothing is written."""
    if not _is_dense(x):
        return False
    if numel := x.numel():
        cap((triton.cdiv(numel, _BLOCK),), x, numel // VECTOR, factor / softcap, float(softcap), BLOCK=_BLOCK)
    return True


def activate(x: Tensor, activation: PlainActivation) -> Tensor | None:
    """As `Backend.activate`, or None for tensors that the kernel does not take."""
    if not _is_dense(x):
        return None
    out = torch.empty_like(x)
    if numel := x.numel():
        activate_all((triton.cdiv(numel, _BLOCK),), x, out, numel // VECTOR, ACTIVATION=activation, BLOCK=_BLOCK)
    return out


def activate_and_mul(x: Tensor, activation: Activation) -> Tensor | None:
    """As `Backend.activate_and_mul`, or None for tensors that the kernel does not take."""
    size = x.shape[-1] // 2
    if not _are_rows(x) or not are_whole(size):
        return None
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    if out.numel():
        activate_and_mul_rows(
            (len(x), triton.cdiv(size, _BLOCK)), x, out, size // VECTOR, x.stride(0) // VECTOR,
            ACTIVATION=activation, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def take_rows(x: Tensor, index: Tensor, factor: float) -> Tensor | None:
    """As `Backend.take_rows`, or None for tensors that the kernel does not take."""
    is_index = index.dim() == 1 and index.is_contiguous() and index.dtype == torch.int64
    if not _are_rows(x) or not is_index or not are_aligned(index):
        return None
    out = torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        take_scaled_rows(
            (len(index), triton.cdiv(x.shape[1], _BLOCK)), x, index, out, x.shape[1] // VECTOR, x.stride(0) // VECTOR,
            float(factor), BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def rotation(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """As `Backend.rotation`, or None for tensors that the kernel does not take."""
    are_vectors = positions.dim() == 1 and frequencies.dim() == 1
    are_typed = (positions.dtype, frequencies.dtype) == (torch.int64, torch.float32) and dtype in FLOATS
    are_dense = positions.is_contiguous() and frequencies.is_contiguous() and are_aligned(positions, frequencies)
    if not (are_vectors and are_typed and are_dense and _has_room(half := len(frequencies))):
        return None
    num_tokens, device = len(positions), positions.device
    cos, sin = (torch.empty(num_tokens, 1, 2 * half, dtype=dtype, device=device) for _ in range(2))
    if num_tokens:
        block_rows, block = _tile(half)
        rotation_rows(
            (triton.cdiv(num_tokens, block_rows),), positions, frequencies, cos, sin, num_tokens, half // VECTOR,
            float(factor), BLOCK_ROWS=block_rows, BLOCK=block,
        )  # fmt: skip
    return cos, sin


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """As `Backend.rotary`, or None for tensors that the kernel does not take."""
    if x.dim() != 3 or x.dtype not in FLOATS or x.stride(2) != 1 or cos.dim() != 3 or cos.shape != sin.shape:
        return None
    num_tokens, heads, size = x.shape
    half = cos.shape[2] // 2
    sizes = half, size, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0)
    are_tables = cos.shape == (num_tokens, 1, 2 * half) and all(
        each.dtype == x.dtype and each.stride(2) == 1 for each in (cos, sin)
    )
    if not (are_tables and are_whole(*sizes) and are_aligned(x, cos, sin) and _has_room(half)) or 2 * half > size:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows := num_tokens * heads:
        block_rows, block = _tile(half)
        rotate_rows(
            (triton.cdiv(num_rows, block_rows),), x, cos, sin, out, num_rows, heads,
            *(each // VECTOR for each in sizes), BLOCK_ROWS=block_rows, BLOCK=block,
        )  # fmt: skip
    return out


def _tile(half: int) -> tuple[int, int]:
    """Rows and columns of a program, for so many pairs in a row."""
    block = next(each for each in _HALVES if half <= each)
    return _BLOCK // block, block


def _has_room(half: int) -> bool:
    return 0 < half <= _HALVES[-1] and are_whole(half)


def _is_dense(x: Tensor) -> bool:
    return x.dtype in FLOATS and x.is_contiguous() and are_whole(x.numel()) and x.numel() < _MOST and are_aligned(x)


def _are_rows(x: Tensor) -> bool:
    is_covered = x.dim() == 2 and x.dtype in FLOATS and x.stride(1) == 1
    return is_covered and are_whole(x.shape[1], x.stride(0)) and are_aligned(x)


def variants(names: Sequence[str] = USUAL) -> Iterator[Variant]:
    """All that a server may launch for models of these types, by Triton's names."""
    kernels = [(activate_all, {"ACTIVATION": each}) for each in get_args(PlainActivation)] + [
        (activate_and_mul_rows, {"ACTIVATION": each}) for kind in get_args(Activation) for each in get_args(kind)
    ]
    plain = [(cap, {}), (take_scaled_rows, {}), *kernels]
    for name in names:
        types = {"index_ptr": "*i64", "positions_ptr": "*i64", "frequencies_ptr": "*fp32"}
        floats = dict.fromkeys(("factor", "softcap", "scale"), "fp32")
        whole = dict.fromkeys(("size", "stride", "num_tokens", "num_rows", "heads", "half"), "i32")
        strides = dict.fromkeys(("token_stride", "head_stride", "cos_stride", "sin_stride"), "i32")
        tensors = dict.fromkeys(("x_ptr", "out_ptr", "cos_ptr", "sin_ptr"), f"*{name}")
        types |= floats | whole | strides | tensors
        for kernel, constants in plain:
            yield _variant(kernel, types, {**constants, "BLOCK": _BLOCK}, "8 numbers a thread: one vector")
        for half in _HALVES:
            for kernel in (rotation_rows, rotate_rows):
                tile = {"BLOCK_ROWS": _tile(half)[0], "BLOCK": half}
                yield _variant(kernel, types, tile, "1,024 pairs: a vector of each half a thread")


def _variant(kernel: Kernel, types: dict[str, str], constants: Mapping[str, object], reason: str) -> Variant:
    typed = {name: types[name] for name in kernel.parameters if name not in constants}
    return Variant(kernel, typed, constants, 4, 3, reason)

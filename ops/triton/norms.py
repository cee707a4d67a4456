"""Norms of rows: a program holds its rows in registers, so that each number is read and written once."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.chain import start_next, wait_for_inputs
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import FLOATS, UNIT, USUAL, VECTOR, are_aligned, are_whole
from quire.ops.triton.variants import Variant

LONGEST = 16384
"""Numbers of the longest row that a program holds; longer ones are left to torch."""


@Kernel
def rms_norm_rows(
    x_ptr, weight_ptr, out_ptr, num_rows, size, heads, token_stride, head_stride, weight_stride, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`x` is [num_rows / heads, heads, size], dense along a row; `weight_stride` is 0 for a weight [size].

    `size` and the strides count vectors of `UNIT` numbers, here and below.
    """
    start_next()
    wait_for_inputs()
    rows, columns, mask, size = _tile(num_rows, size, BLOCK_ROWS, BLOCK)
    starts = _starts(rows, heads, token_stride, head_stride)
    x = tl.load(x_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + rows % heads * (weight_stride * UNIT) + columns, mask=mask, other=0.0)
    out = _rms_norm(x, weight, size, eps)
    tl.store(out_ptr + rows.to(tl.int64) * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def add_rms_norm_rows(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, size, stride, residual_stride, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds `x` to `residual`, in place, and normalizes the rounded sum."""
    start_next()
    wait_for_inputs()
    rows, columns, mask, size = _tile(num_rows, size, BLOCK_ROWS, BLOCK)
    x = tl.load(x_ptr + rows.to(tl.int64) * (stride * UNIT) + columns, mask=mask, other=0.0)
    residual_at = residual_ptr + rows.to(tl.int64) * (residual_stride * UNIT) + columns
    residual = tl.load(residual_at, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    total = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
    tl.store(residual_at, total, mask=mask)
    out = _rms_norm(total.to(tl.float32), weight, size, eps)
    tl.store(out_ptr + rows.to(tl.int64) * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def layer_norm_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, size, heads, token_stride, head_stride, weight_stride, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like `rms_norm_rows`; without a weight, its pointer is None, and so is that of the bias [size]."""
    start_next()
    wait_for_inputs()
    rows, columns, mask, size = _tile(num_rows, size, BLOCK_ROWS, BLOCK)
    starts = _starts(rows, heads, token_stride, head_stride)
    x = tl.load(x_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - (tl.sum(x, 1) / size)[:, None], 0.0)
    out = centred * tl.rsqrt(tl.sum(centred * centred, 1) / size + eps)[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + rows % heads * (weight_stride * UNIT) + columns, mask=mask, other=0.0)
        out *= weight.to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows.to(tl.int64) * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile(num_rows, size, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows and columns [BLOCK_ROWS, 1] and [1, BLOCK] of this program, and which of them exist."""
    size = size * UNIT
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    return rows, columns, (rows < num_rows) & (columns < size), size


@triton.jit
def _starts(rows, heads, token_stride, head_stride):
    rows = rows.to(tl.int64)
    return rows // heads * (token_stride * UNIT) + rows % heads * (head_stride * UNIT)


@triton.jit
def _rms_norm(x, weight, size, eps):
    """The normalized rows are rounded to the weight's type, and so is their product with it."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
    normal = (x * inverse).to(weight.dtype).to(tl.float32)
    return (normal * weight.to(tl.float32)).to(weight.dtype)


class RowTile(NamedTuple):
    """Rows of a program, their length in it, and its warps."""

    rows: int
    block: int
    num_warps: int
    reason: str


HEAD_TILES = tuple(
    RowTile(1024 // block, block, 4, "rows of heads share a program: one vector a thread") for block in (128, 512)
)
ROW_TILES = tuple(
    RowTile(1, block, min(16, max(4, block // 512)), "8 to 32 numbers a thread: few enough for its registers")
    for block in (2048, 4096, 8192, LONGEST)
)
TILES = (*HEAD_TILES, *ROW_TILES)


def tile_of(size: int) -> RowTile:
    """The tile for rows of `size` numbers. It is a function of the size alone: so is the order of a row's sums."""
    return next(tile for tile in TILES if size <= tile.block)


class _Heads(NamedTuple):
    """A tensor as [tokens, heads, size], in place."""

    heads: int
    strides: tuple[int, int]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """As `Backend.rms_norm`, or None for tensors that the kernel does not take."""
    shape = _as_heads(x)
    if shape is None or not _fit(x, shape, weight) or weight.dtype not in (x.dtype, torch.float32):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = *shape.strides, _weight_stride(weight)
    _launch(rms_norm_rows, (x, weight, out), x, (shape.heads,), strides, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """The norm of `x + residual`, which replaces `residual`; or None for tensors that the kernel does not take."""
    shape = _as_heads(x)
    if shape is None or not _fit(x, shape, weight) or weight.dtype not in (residual.dtype, torch.float32):
        return None
    if x.dim() != 2 or weight.dim() != 1 or x.shape != residual.shape:
        return None
    is_dense = residual.dtype == x.dtype and residual.stride(1) == 1 and residual.stride(0) >= x.shape[1]
    if not is_dense or not are_whole(residual.stride(0)) or not are_aligned(residual):
        return None
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch(add_rms_norm_rows, (x, residual, weight, out), x, (), (x.stride(0), residual.stride(0)), eps)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """As `Backend.layer_norm`, or None for tensors that the kernel does not take."""
    shape = _as_heads(x)
    given = [each for each in (weight, bias) if each is not None]
    if shape is None or not _fit(x, shape, *given) or any(each.dtype != x.dtype for each in given):
        return None
    if bias is not None and (weight is None or bias.dim() != 1):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = *shape.strides, _weight_stride(weight)
    _launch(layer_norm_rows, (x, weight, bias, out), x, (shape.heads,), strides, eps)
    return out


def _as_heads(x: Tensor) -> _Heads | None:
    if x.dim() > 3 and x.is_contiguous():
        x = x.flatten(0, -3)
    if not 1 <= x.dim() <= 3 or x.stride(-1) != 1:
        return None
    if x.dim() == 3:
        return _Heads(x.shape[1], (x.stride(0), x.stride(1)))
    return _Heads(x.shape[0], (0, x.stride(0))) if x.dim() == 2 else _Heads(1, (0, 0))


def _launch(
    kernel: Kernel,
    tensors: tuple[Tensor | None, ...],
    x: Tensor,
    heads: tuple[int, ...],
    strides: tuple[int, ...],
    eps: float,
) -> None:
    size = x.shape[-1]
    if not (num_rows := x.numel() // size):
        return
    tile = tile_of(size)
    kernel(
        (triton.cdiv(num_rows, tile.rows),), *tensors, num_rows, size // VECTOR, *heads,
        *(stride // VECTOR for stride in strides), float(eps),
        BLOCK_ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
    )  # fmt: skip


def _weight_stride(weight: Tensor | None) -> int:
    return weight.stride(0) if weight is not None and weight.dim() == 2 else 0


def _fit(x: Tensor, shape: _Heads, *parameters: Tensor) -> bool:
    size = x.shape[-1]
    return (
        x.dtype in FLOATS
        and 0 < size <= LONGEST
        and are_aligned(x, *parameters)
        and are_whole(size, *shape.strides, *map(_weight_stride, parameters))
        and all(
            each.dtype in FLOATS
            and each.stride(-1) == 1
            and each.shape[-1] == size
            and (each.dim() == 1 or each.shape == (shape.heads, size))
            for each in parameters
        )
    )


def variants(names: Sequence[str] = USUAL) -> Iterator[Variant]:
    """All that a server may launch for models of these types, by Triton's names."""
    whole = ("num_rows", "size", "heads", "stride", "residual_stride", "token_stride", "head_stride", "weight_stride")
    for tile, name in itertools.product(TILES, names):
        tensors = dict.fromkeys(("x_ptr", "out_ptr", "residual_ptr", "weight_ptr", "bias_ptr"), f"*{name}")
        types = {**dict.fromkeys(whole, "i32"), "eps": "fp32", **tensors}
        for kernel in (rms_norm_rows, add_rms_norm_rows):
            for weight in sorted({f"*{name}", "*fp32"}):
                yield _variant(kernel, types | {"weight_ptr": weight}, tile)
        for absent in ((), ("bias_ptr",), ("weight_ptr", "bias_ptr")):
            yield _variant(layer_norm_rows, types, tile, absent)


def _variant(kernel: Kernel, types: dict[str, str], tile: RowTile, absent: tuple[str, ...] = ()) -> Variant:
    constants = {"BLOCK_ROWS": tile.rows, "BLOCK": tile.block, **dict.fromkeys(absent)}
    typed = {name: types[name] for name in kernel.parameters if name not in constants}
    return Variant(kernel, typed, constants, tile.num_warps, 3, tile.reason)

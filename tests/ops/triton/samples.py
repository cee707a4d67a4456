"""Kernels for tests of what surrounds kernels."""

import triton
import triton.language as tl

from quire.ops.triton.launch import Kernel

FACTOR = tl.constexpr(3)


@triton.jit
def helped(x):
    return x * FACTOR


@Kernel
def scale(out_ptr, x_ptr, bias_ptr, row_stride: tl.int64, num_columns, factor, BLOCK: tl.constexpr):
    """out[row] = factor * 3 * x[row] + bias"""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    stride = row_stride // 8 * 8
    mask = columns < num_columns // 8 * 8
    x = tl.load(x_ptr + row * stride + columns, mask).to(tl.float32)
    x = helped(x) * factor
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask).to(tl.float32)
    tl.store(out_ptr + row * stride + columns, x.to(out_ptr.dtype.element_ty), mask)


@Kernel
def product(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [BLOCK_M, BLOCK_N] = weight [BLOCK_M, num_columns] @ x [BLOCK_N, num_columns].T"""
    rows, tokens, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    num_columns = num_columns // 16 * 16
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, num_columns, BLOCK_K):
        weight = tl.load(weight_ptr + rows[:, None] * num_columns + start + columns[None, :])
        x = tl.load(x_ptr + tokens[None, :] * num_columns + start + columns[:, None])
        total = tl.dot(weight, x, total)
    tl.store(out_ptr + rows[:, None] * BLOCK_N + tokens[None, :], total)

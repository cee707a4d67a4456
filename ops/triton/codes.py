"""Kernels of weights of 4 or 8 bits: their codes become numbers in registers, on the way into a product."""

import triton
import triton.language as tl

from quire.ops.triton.launch import Kernel
from quire.ops.triton.outputs import finish, weight_rows


@triton.jit
def values_of(codes, flip, base, KIND: tl.constexpr):
    """The values of `codes`, int32 from 0 to 255 or 15, as float32.

    Conversions of integers are slow. Instead, the codes are put among the bits of a float32: below the 23 bits of 2²³,
    which is then subtracted as a part of `base`; or where its exponent begins, which is then made larger.
    """
    if KIND == "int8":
        return ((codes ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 128)
    elif KIND == "line":
        return ((codes ^ flip) | 0x4B000000).to(tl.float32, bitcast=True) - base
    elif KIND == "float8_e4m3fn":
        return (((codes << 24) >> 4) & (0x87F00000 - (1 << 32))).to(tl.float32, bitcast=True) * 2.0**120
    elif KIND == "float8_e5m2":
        return (((codes << 24) >> 3) & (0x8FE00000 - (1 << 32))).to(tl.float32, bitcast=True) * 2.0**112
    else:
        tl.static_assert(KIND == "float4_e2m1")
        return (((codes << 28) >> 6) & (0x81C00000 - (1 << 32))).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def numbers_of(
    codes_ptr,
    table_ptr,
    scales_ptr,
    offsets_ptr,
    rows,
    first,
    in_features,
    num_groups,
    group_size,
    flip,
    base,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """The numbers of the weight's `rows`, for `BLOCK_IN` inputs from `first` on: [rows, BLOCK_IN] float32."""
    HALF: tl.constexpr = BLOCK_IN // 2
    BLOCK_ROWS: tl.constexpr = rows.shape[0]
    if KIND == "int8" or KIND == "float8_e4m3fn" or KIND == "float8_e5m2":
        inputs = first + tl.arange(0, BLOCK_IN)
        places = codes_ptr + rows.to(tl.int64)[:, None] * in_features + inputs[None, :]
        known = (inputs < in_features)[None, :]
        codes = tl.load(places, mask=known, other=0, eviction_policy="evict_first").to(tl.int32)
        values = values_of(codes, flip, base, KIND)
    else:
        pairs = first // 2 + tl.arange(0, HALF)
        places = codes_ptr + rows.to(tl.int64)[:, None] * (in_features // 32 * 16) + pairs[None, :]
        known = (pairs < in_features // 32 * 16)[None, :]
        codes = tl.load(places, mask=known, other=0, eviction_policy="evict_first").to(tl.int32)
        if KIND == "table":
            low, high = tl.load(table_ptr + (codes & 15)), tl.load(table_ptr + (codes >> 4))
        else:
            low, high = values_of(codes & 15, flip, base, KIND), values_of(codes >> 4, flip, base, KIND)
        values = tl.reshape(tl.join(low, high), (BLOCK_ROWS, BLOCK_IN))
    COUNT: tl.constexpr = BLOCK_IN // GROUP
    groups = first // group_size + tl.arange(0, COUNT)
    places = rows.to(tl.int64)[:, None] * num_groups + groups[None, :]
    known = (groups < num_groups)[None, :]
    scales = tl.load(scales_ptr + places, mask=known, other=0.0).to(tl.float32)
    values = tl.reshape(values, (BLOCK_ROWS, COUNT, GROUP)) * scales[:, :, None]
    if offsets_ptr is not None:
        values += tl.load(offsets_ptr + places, mask=known, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(values, (BLOCK_ROWS, BLOCK_IN))


@Kernel
def multiply_few_codes(
    x_ptr,
    codes_ptr,
    table_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_tokens,
    out_features,
    in_features,
    num_groups,
    group_size,
    x_stride,
    out_stride,
    split,
    num_biases,
    flip,
    base,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """As `multiply_few`, for a weight of codes."""
    in_features, x_stride = in_features // 16 * 16, x_stride // 8 * 8
    part = tl.program_id(1)
    rows = weight_rows(out_features, BLOCK_ROWS, ACTIVATION is not None)
    tokens, inputs = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_IN)
    places = x_ptr + tokens[None, :] * x_stride + inputs[:, None]
    steps = tl.cdiv(in_features, BLOCK_IN)
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for step in range(part * steps // split, (part + 1) * steps // split):
        first = step * BLOCK_IN
        known = (inputs < in_features - first)[:, None] & (tokens < num_tokens)[None, :]
        x = tl.load(places + first, mask=known, other=0.0)
        weight = numbers_of(
            codes_ptr, table_ptr, scales_ptr, offsets_ptr, rows, first, in_features, num_groups, group_size,
            flip, base, KIND, GROUP, BLOCK_IN,
        )  # fmt: skip
        total = tl.dot(weight.to(x.dtype), x, total, input_precision="ieee")
    finish(
        total, rows, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_tokens, out_stride, split, num_biases,
        ACTIVATION, BLOCK_TOKENS, BLOCK_ROWS,
    )  # fmt: skip


@Kernel
def dequantize_codes(
    codes_ptr,
    table_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    out_features,
    in_features,
    num_groups,
    group_size,
    flip,
    base,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """The numbers of a weight [out_features, in_features], in the order of its codes; the grid is of its blocks."""
    in_features = in_features // 16 * 16
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(1) * BLOCK_IN
    numbers = numbers_of(
        codes_ptr, table_ptr, scales_ptr, offsets_ptr, tl.minimum(rows, out_features - 1), first, in_features,
        num_groups, group_size, flip, base, KIND, GROUP, BLOCK_IN,
    )  # fmt: skip
    inputs = first + tl.arange(0, BLOCK_IN)
    places = out_ptr + rows.to(tl.int64)[:, None] * in_features + inputs[None, :]
    known = (rows < out_features)[:, None] & (inputs < in_features)[None, :]
    tl.store(places, numbers.to(out_ptr.dtype.element_ty), mask=known)

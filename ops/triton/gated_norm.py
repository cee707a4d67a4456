"""The gated norm of recurrent layers' outputs."""

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl

from quire.ops.triton.activations import softplus
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import USUAL
from quire.ops.triton.variants import Variant, types_of


@Kernel
def normalize_gated(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_groups,
    num_weights,
    size,
    x_stride,
    gate_stride,
    eps,
    IS_GATE_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The norm and the factor of one group of one token; the grid is (tokens, groups). See `gated_rms_norm`.

    `IS_EVEN`: groups are aligned.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        size, x_stride, gate_stride = size // 8 * 8, x_stride // 8 * 8, gate_stride // 8 * 8
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, SIZE)
    is_column = columns < size
    x = tl.load(x_ptr + token * x_stride + group * size + columns, mask=is_column, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + group * size + columns, mask=is_column, other=0.0).to(tl.float32)
    factor = _factor(gate, ACTIVATION)
    if IS_GATE_FIRST:
        x = x * factor
    weight = tl.load(weight_ptr + group % num_weights * size + columns, mask=is_column, other=0.0).to(tl.float32)
    mean = tl.sum(tl.where(is_column, x * x, 0.0), axis=0) / size
    out = x * tl.rsqrt(mean + eps) * weight
    if not IS_GATE_FIRST:
        out = out * factor
    places = out_ptr + (token * num_groups + group) * size + columns
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _factor(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(gate)
    elif ACTIVATION == "softplus":
        return softplus(gate)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return gate


def norm_warps(columns: int) -> int:
    """Returns the warps of a program: each thread has up to 32 numbers."""
    return 1 if columns <= 512 else 4 if columns <= 4096 else 8


def variants() -> Iterator[Variant]:
    """The forms of models that normalize heads of 128, or whole rows of 4,096."""
    for name, (size, gate_first) in product(USUAL, ((128, False), (4096, True))):
        constants = {"IS_GATE_FIRST": gate_first, "ACTIVATION": "silu", "IS_EVEN": True, "SIZE": size}
        types = types_of(normalize_gated, constants, {"eps": "fp32"}, name)
        yield Variant(normalize_gated, types, constants, norm_warps(size), 1, "few numbers a thread")

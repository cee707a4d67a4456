"""Convolutions of recurrent layers over a row's last tokens, of which the state holds the inputs before the step.

A row whose slot is negative is padding: no state is read or written for it, and its output is undefined.
"""

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl

from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import USUAL
from quire.ops.triton.variants import Variant, types_of

CHANNELS = 256
"""Channels of a program, which is one warp: 16 bytes a thread, and few rows make many programs."""


@Kernel
def convolve_token(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    out_ptr,
    num_channels,
    x_stride,
    WIDTH: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolution of the channels of one row of one token; the grid is (rows, blocks of channels).

    See `causal_conv1d`. `IS_EVEN`: rows are aligned.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        num_channels, x_stride = num_channels // 8 * 8, x_stride // 8 * 8
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    is_known = is_channel & (tl.load(is_new_ptr + row) + channels * 0 == 0)
    states = state_ptr + slot * (WIDTH - 1) * num_channels + channels
    weights = weight_ptr + channels
    total = tl.zeros((CHANNELS,), tl.float32)
    for place in tl.static_range(WIDTH - 1):
        before = tl.load(states + place * num_channels, mask=is_known, other=0.0)
        weight = tl.load(weights + place * num_channels, mask=is_channel, other=0.0)
        total += before.to(tl.float32) * weight.to(tl.float32)
        if place > 0:
            tl.store(states + (place - 1) * num_channels, before, mask=is_channel)
    x = tl.load(x_ptr + row * x_stride + channels, mask=is_channel, other=0.0)
    weight = tl.load(weights + (WIDTH - 1) * num_channels, mask=is_channel, other=0.0)
    total += x.to(tl.float32) * weight.to(tl.float32)
    if WIDTH > 1:
        tl.store(states + (WIDTH - 2) * num_channels, x, mask=is_channel)
    out = _finish(total, bias_ptr, channels, is_channel, IS_ACTIVATED)
    tl.store(out_ptr + row * num_channels + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)


@Kernel
def convolve_tokens(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    num_channels,
    x_stride,
    WIDTH: tl.constexpr,
    IS_ACTIVATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Like `convolve_token`, for rows of any tokens; the grid is (tokens, blocks of channels). States stay."""
    if IS_EVEN:  # tells the compiler, and changes nothing
        num_channels, x_stride = num_channels // 8 * 8, x_stride // 8 * 8
    token = tl.program_id(0).to(tl.int64)
    row = tl.full((), 0, tl.int32)
    above = num_rows
    while row + 1 < above:
        middle = (row + above) // 2
        is_before = tl.load(starts_ptr + middle) <= token
        row = tl.where(is_before, middle, row)
        above = tl.where(is_before, above, middle)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    is_known = is_channel & (tl.load(is_new_ptr + row) + channels * 0 == 0)
    states = state_ptr + tl.load(slots_ptr + row) * (WIDTH - 1) * num_channels + channels
    place_in_row = token - tl.load(starts_ptr + row)
    total = tl.zeros((CHANNELS,), tl.float32)
    for place in tl.static_range(WIDTH):
        x = _input(
            place_in_row - (WIDTH - 1) + place, x_ptr + (token - place_in_row) * x_stride + channels, x_stride, states,
            num_channels, is_channel, is_known, WIDTH,
        )  # fmt: skip
        weight = tl.load(weight_ptr + place * num_channels + channels, mask=is_channel, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    out = _finish(total, bias_ptr, channels, is_channel, IS_ACTIVATED)
    tl.store(out_ptr + token * num_channels + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)


@Kernel
def keep_inputs(
    x_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    num_channels,
    x_stride,
    WIDTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Overwrites the states by the inputs of the rows' last tokens; the grid is (rows, blocks of channels)."""
    if IS_EVEN:  # tells the compiler, and changes nothing
        num_channels, x_stride = num_channels // 8 * 8, x_stride // 8 * 8
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    is_known = is_channel & (tl.load(is_new_ptr + row) + channels * 0 == 0)
    states = state_ptr + tl.load(slots_ptr + row) * (WIDTH - 1) * num_channels + channels
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    for place in tl.static_range(WIDTH - 1):  # a thread reads only places that it has not written yet
        x = _input(
            length - (WIDTH - 1) + place, x_ptr + start * x_stride + channels, x_stride, states, num_channels,
            is_channel, is_known, WIDTH,
        )  # fmt: skip
        tl.store(states + place * num_channels, x, mask=is_channel)


@triton.jit
def _input(place, row_ptrs, x_stride, states, num_channels, is_channel, is_known, WIDTH: tl.constexpr):
    """The inputs of the token at a place of a row; those before the row's first token are in the state."""
    is_inside = is_channel & (place + tl.zeros(is_channel.shape, tl.int32) >= 0)
    inside = tl.load(row_ptrs + place * x_stride, mask=is_inside, other=0.0)
    before = tl.load(states + (place + WIDTH - 1) * num_channels, mask=is_known & (is_inside == 0), other=0.0)
    return tl.where(is_inside, inside, before.to(inside.dtype))


@triton.jit
def _finish(total, bias_ptr, channels, is_channel, IS_ACTIVATED: tl.constexpr):
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    if IS_ACTIVATED:
        total = total * tl.sigmoid(total)
    return total


def variants() -> Iterator[Variant]:
    """The forms of models with convolutions of four tokens."""
    rows = {"slots_ptr": "*i64", "is_new_ptr": "*u8", "starts_ptr": "*i64"}
    common: dict[str, object] = {"WIDTH": 4, "IS_EVEN": True, "CHANNELS": CHANNELS}
    for name in USUAL:
        for kernel, bias in product((convolve_token, convolve_tokens), ({"bias_ptr": None}, {})):
            constants = {**common, "IS_ACTIVATED": True, **bias}
            yield Variant(kernel, types_of(kernel, constants, rows, name), constants, 1, 1, "16 bytes a thread")
        yield Variant(keep_inputs, types_of(keep_inputs, common, rows, name), common, 1, 1, "16 bytes a thread")

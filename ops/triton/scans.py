"""States whose channels do not mix: Mamba 1, the averages of RWKV, and the real-gated linear recurrent unit.

A program keeps the states of some channels of one row in registers, and reads the row's tokens one after another. The
grid is (rows, blocks of channels). A row whose slot is negative is padding: no state is read or written for it, and its
output is undefined. Without `starts_ptr`, each row has one token.
"""

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl

from quire.ops.triton.activations import softplus
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import USUAL
from quire.ops.triton.variants import Variant, types_of

SCANNED_CHANNELS = 64
"""Channels of a program of Mamba's scan: with 16 elements each, 8 numbers a thread."""
LONE_CHANNELS = 128
"""Channels of a program where each has one number, or three: a channel a thread."""


@Kernel
def scan_tokens(
    x_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    gate_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    out_ptr,
    num_channels,
    size,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    IS_EVEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The scan of Mamba 1. `IS_EVEN`: channels are a multiple of 8."""
    if IS_EVEN:  # tells the compiler, and changes nothing
        num_channels = num_channels // 8 * 8
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    channels, elements = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, SIZE)
    is_channel, is_element = channels < num_channels, elements < size
    is_there = is_element[:, None] & is_channel[None, :]
    is_known = is_there & (tl.load(is_new_ptr + row) + elements * 0 == 0)[:, None]
    places = elements[:, None] * num_channels + channels[None, :]
    state = tl.load(state_ptr + slot * size * num_channels + places, mask=is_known, other=0.0)
    a = tl.load(a_ptr + places, mask=is_there, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + channels, mask=is_channel, other=0.0)
    d = tl.load(d_ptr + channels, mask=is_channel, other=0.0)
    begin = row
    end = row + 1
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    for token in range(begin, end):
        x = tl.load(x_ptr + token * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + token * dt_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        step = softplus(step + dt_bias)
        b = tl.load(b_ptr + token * b_stride + elements, mask=is_element, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + elements, mask=is_element, other=0.0).to(tl.float32)
        state = tl.exp(step[None, :] * a) * state + b[:, None] * (step * x)[None, :]
        out = tl.sum(state * c[:, None], axis=0) + d * x
        gate = tl.load(gate_ptr + token * gate_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        out = out * (gate * tl.sigmoid(gate))
        tl.store(out_ptr + token * num_channels + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)
    tl.store(state_ptr + slot * size * num_channels + places, state, mask=is_there)


@Kernel
def average_tokens(
    k_ptr,
    v_ptr,
    first_ptr,
    log_decay_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    out_ptr,
    num_channels,
    k_stride,
    v_stride,
    CHANNELS: tl.constexpr,
):
    """The averages of RWKV 4, see `RecurrentOperations.wkv`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    is_known = is_channel & (tl.load(is_new_ptr + row) + channels * 0 == 0)
    states = state_ptr + slot * 3 * num_channels + channels
    total = tl.load(states, mask=is_known, other=0.0)
    weight = tl.load(states + num_channels, mask=is_known, other=0.0)
    most = tl.load(states + 2 * num_channels, mask=is_known, other=0.0)
    first = tl.load(first_ptr + channels, mask=is_channel, other=0.0)
    log_decay = tl.load(log_decay_ptr + channels, mask=is_channel, other=0.0)
    begin = row
    end = row + 1
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    for token in range(begin, end):
        k = tl.load(k_ptr + token * k_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        most = tl.where(weight == 0.0, float("-inf"), most)  # nothing was added yet
        highest = tl.maximum(most, first + k)
        held, new = tl.exp(most - highest), tl.exp(first + k - highest)
        out = (held * total + new * v) / (held * weight + new)
        tl.store(out_ptr + token * num_channels + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)
        highest = tl.maximum(most + log_decay, k)
        held, new = tl.exp(most + log_decay - highest), tl.exp(k - highest)
        total, weight, most = held * total + new * v, held * weight + new, highest
    tl.store(states, total, mask=is_channel)
    tl.store(states + num_channels, weight, mask=is_channel)
    tl.store(states + 2 * num_channels, most, mask=is_channel)


@Kernel
def gate_tokens(
    x_ptr,
    input_gate_ptr,
    input_bias_ptr,
    decay_gate_ptr,
    decay_bias_ptr,
    log_decay_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    out_ptr,
    num_channels,
    x_stride,
    input_gate_stride,
    decay_gate_stride,
    CHANNELS: tl.constexpr,
):
    """The real-gated linear recurrent unit, see `RecurrentOperations.rg_lru`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    is_begun = is_channel & (tl.load(is_new_ptr + row) + channels * 0 == 0)
    state = tl.load(state_ptr + slot * num_channels + channels, mask=is_begun, other=0.0)
    input_bias = tl.load(input_bias_ptr + channels, mask=is_channel, other=0.0)
    decay_bias = tl.load(decay_bias_ptr + channels, mask=is_channel, other=0.0)
    most_decay = tl.load(log_decay_ptr + channels, mask=is_channel, other=0.0)
    begin = row
    end = row + 1
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    for token in range(begin, end):
        x = tl.load(x_ptr + token * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        gate = tl.load(input_gate_ptr + token * input_gate_stride + channels, mask=is_channel, other=0.0)
        decay = tl.load(decay_gate_ptr + token * decay_gate_stride + channels, mask=is_channel, other=0.0)
        decay = tl.sigmoid(decay.to(tl.float32) + decay_bias) * most_decay
        factor = tl.where(is_begun, tl.sqrt(-_exp_minus_1(2.0 * decay)), 1.0)
        state = tl.exp(decay) * state + x * tl.sigmoid(gate.to(tl.float32) + input_bias) * factor
        tl.store(out_ptr + token * num_channels + channels, state.to(out_ptr.dtype.element_ty), mask=is_channel)
        is_begun = is_channel
    tl.store(state_ptr + slot * num_channels + channels, state, mask=is_channel)


@triton.jit
def _exp_minus_1(x):
    """`exp(x) - 1` for x up to 0, also where it is small."""
    series = x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7))))))
    return tl.where(x > -0.3, series, tl.exp(x) - 1.0)


def variants() -> Iterator[Variant]:
    """The forms of models, of Mamba's with 16 elements a channel, for decode steps and prompts."""
    wide = dict.fromkeys(("a_ptr", "dt_bias_ptr", "d_ptr", "state_ptr", "first_ptr", "log_decay_ptr"), "*fp32")
    wide |= dict.fromkeys(("input_bias_ptr", "decay_bias_ptr"), "*fp32")
    wide |= {"slots_ptr": "*i64", "is_new_ptr": "*u8", "starts_ptr": "*i64"}
    for name, starts in product(USUAL, ({"starts_ptr": None}, {})):
        scanned: dict[str, object] = {"IS_EVEN": True, "SIZE": 16, "CHANNELS": SCANNED_CHANNELS, **starts}
        types = types_of(scan_tokens, scanned, wide, name)
        yield Variant(scan_tokens, types, scanned, 4, 1, "8 numbers of the state a thread")
        lone: dict[str, object] = {"CHANNELS": LONE_CHANNELS, **starts}
        for kernel in (average_tokens, gate_tokens):
            yield Variant(kernel, types_of(kernel, lone, wide, name), lone, 4, 1, "a channel a thread")

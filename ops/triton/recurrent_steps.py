"""Decode steps of recurrent layers: one token a row, whose state is read and overwritten in its place.

A row whose slot is negative is padding: no state is read or written for it, and its output is undefined.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from quire.ops.triton.activations import softplus
from quire.ops.triton.launch import Kernel
from quire.ops.triton.variants import Variant

CHANNELS = 256
"""Channels of a program of the convolution, which is one warp: 16 bytes a thread, and few rows make many programs."""
VALUE_COLUMNS = 32
"""Columns of a state [key_dim, value_dim] that a program has: with 128 keys, 32 numbers a thread."""
SCANNED_CHANNELS = 64
"""Channels of a program of Mamba's scan: with 16 elements each, 8 numbers a thread."""

_EPS = tl.constexpr(1e-6)


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
    """Convolution of the channels of one row; the grid is (rows, blocks of channels). See `causal_conv1d`.

    `IS_EVEN`: rows are aligned.
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
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    if IS_ACTIVATED:
        total = total * tl.sigmoid(total)
    tl.store(out_ptr + row * num_channels + channels, total.to(out_ptr.dtype.element_ty), mask=is_channel)


@Kernel
def update_outer_products(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_ptr,
    beta_ptr,
    d_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    out_ptr,
    num_heads,
    share,
    key_dim,
    value_dim,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dt_stride,
    dt_head_stride,
    beta_stride,
    low,
    high,
    beta_scale,
    FORM: tl.constexpr,
    HAS_CHANNEL_DECAY: tl.constexpr,
    HAS_LEAST_DECAY: tl.constexpr,
    IS_EVEN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """A state of decayed outer products: some columns of one head of one row.

    The grid is (rows, heads, blocks of `VALUES` columns). `FORM` is "delta" for `gated_delta_rule`, whose least decay
    is `low`; "ssd", whose steps are within `low` and `high`; or "lightning", whose logarithms of decays are `a_ptr`.
    Head h reads group h // share. `IS_EVEN`: there are `KEYS` keys, and a multiple of `VALUES` columns.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        key_dim, value_dim = KEYS, value_dim // VALUES * VALUES
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    group = head // share
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    is_there = is_key[:, None] & is_value[None, :]
    is_known = is_there & (tl.load(is_new_ptr + row) + keys * 0 == 0)[:, None]
    places = state_ptr + (slot * num_heads + head) * key_dim * value_dim + keys[:, None] * value_dim + values[None, :]
    state = tl.load(places, mask=is_known, other=0.0)
    q = tl.load(q_ptr + row * q_stride + group * q_head_stride + keys, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + group * k_head_stride + keys, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_stride + head * v_head_stride + values, mask=is_value, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + head)
    if FORM == "delta":
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * tl.rsqrt(key_dim * 1.0))
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        beta = tl.sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32)) * beta_scale
        decay = _decay(
            dt_ptr + row * dt_stride + head * dt_head_stride, dt_bias_ptr, a, head, keys, is_key, key_dim, low,
            HAS_CHANNEL_DECAY, HAS_LEAST_DECAY,
        )  # fmt: skip
        state = state * decay
        added = beta * (v - tl.sum(state * k[:, None], axis=0))
    elif FORM == "ssd":
        raw = tl.load(dt_ptr + row * dt_stride + head * dt_head_stride).to(tl.float32) + tl.load(dt_bias_ptr + head)
        step = tl.minimum(tl.maximum(softplus(raw), low), high)
        state = state * tl.exp(step * a)
        added = v * step
    else:
        tl.static_assert(FORM == "lightning")
        state = state * tl.exp(a)
        added = v
    state += k[:, None] * added[None, :]
    out = tl.sum(state * q[:, None], axis=0)
    if FORM == "ssd":
        out += v * tl.load(d_ptr + head)
    tl.store(places, state, mask=is_there)
    outputs = out_ptr + (row * num_heads + head) * value_dim + values
    tl.store(outputs, out.to(out_ptr.dtype.element_ty), mask=is_value)


@triton.jit
def _decay(
    dt_ptr, dt_bias_ptr, a, head, keys, is_key, key_dim, least, HAS_CHANNEL_DECAY: tl.constexpr,
    HAS_LEAST_DECAY: tl.constexpr,
):  # fmt: skip
    """The decay of a head's state: one, or [keys, 1]."""
    if HAS_CHANNEL_DECAY:
        raw = tl.load(dt_ptr + keys, mask=is_key, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias_ptr + head * key_dim + keys, mask=is_key, other=0.0)
    else:
        raw = tl.load(dt_ptr).to(tl.float32) + tl.load(dt_bias_ptr + head)
    log_decay = least * tl.sigmoid(raw * -a) if HAS_LEAST_DECAY else softplus(raw) * a
    decay = tl.exp(log_decay)
    return decay[:, None] if HAS_CHANNEL_DECAY else decay


@Kernel
def scan_token(
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
    """The scan of Mamba 1 for some channels of one row; the grid is (rows, blocks of channels).

    `IS_EVEN`: channels are a multiple of 8.
    """
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
    x = tl.load(x_ptr + row * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
    step = tl.load(dt_ptr + row * dt_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias_ptr + channels, mask=is_channel, other=0.0))
    b = tl.load(b_ptr + row * b_stride + elements, mask=is_element, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_stride + elements, mask=is_element, other=0.0).to(tl.float32)
    state = tl.exp(step[None, :] * a) * state + b[:, None] * (step * x)[None, :]
    out = tl.sum(state * c[:, None], axis=0) + tl.load(d_ptr + channels, mask=is_channel, other=0.0) * x
    gate = tl.load(gate_ptr + row * gate_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
    out = out * (gate * tl.sigmoid(gate))
    tl.store(state_ptr + slot * size * num_channels + places, state, mask=is_there)
    tl.store(out_ptr + row * num_channels + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)


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


def variants() -> Iterator[Variant]:
    """The forms of bfloat16 models with states of 64 or 128 keys, 16 elements a channel, and convolutions of 4."""
    rows = {"slots_ptr": "*i64", "is_new_ptr": "*u8"}
    absent: dict[str, object] = {"bias_ptr": None}
    for bias in (absent, {}):
        constants = {"WIDTH": 4, "IS_ACTIVATED": True, "IS_EVEN": True, "CHANNELS": CHANNELS, **bias}
        yield Variant(convolve_token, _types(convolve_token, constants, rows), constants, 1, 1, "16 bytes a thread")
    delta: dict[str, object] = {"FORM": "delta", "d_ptr": None}
    ssd: dict[str, object] = {"FORM": "ssd", "beta_ptr": None, "HAS_CHANNEL_DECAY": False}
    wide = dict.fromkeys(("a_ptr", "dt_bias_ptr", "d_ptr", "state_ptr"), "*fp32") | rows
    floats = dict.fromkeys(("low", "high", "beta_scale"), "fp32")
    common: dict[str, object] = {"VALUES": VALUE_COLUMNS, "HAS_LEAST_DECAY": False, "IS_EVEN": True, "KEYS": 128}
    for form in (delta | {"HAS_CHANNEL_DECAY": False}, delta | {"HAS_CHANNEL_DECAY": True}, ssd):
        types = _types(update_outer_products, common | form, wide | floats)
        yield Variant(update_outer_products, types, common | form, 4, 1, "32 numbers of the state a thread")
    constants = {"IS_EVEN": True, "SIZE": 16, "CHANNELS": SCANNED_CHANNELS}
    yield Variant(scan_token, _types(scan_token, constants, wide), constants, 4, 1, "8 numbers of the state a thread")
    for size, gate_first in ((128, False), (4096, True)):
        constants = {"IS_GATE_FIRST": gate_first, "ACTIVATION": "silu", "IS_EVEN": True, "SIZE": size}
        types = _types(normalize_gated, constants, {"eps": "fp32"})
        yield Variant(normalize_gated, types, constants, norm_warps(size), 1, "few numbers a thread")


def norm_warps(columns: int) -> int:
    """Returns the warps of a program of `normalize_gated`: each thread has up to 32 numbers."""
    return 1 if columns <= 512 else 4 if columns <= 4096 else 8


def _types(kernel: Kernel, constants: dict[str, object], known: dict[str, str]) -> dict[str, str]:
    """The types of a kernel's arguments: `known` ones, pointers to bfloat16, and integers."""
    names = [name for name in kernel.parameters if name not in constants]
    return {name: known.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}

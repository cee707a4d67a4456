"""States of decayed outer products: Mamba 2, lightning attention and gated delta rules.

A program keeps its part of a row's state in registers, and adds the row's tokens one after another. So a token's bits
do not depend on how a prompt is cut. `chunks.py` is faster for many tokens. A row whose slot is negative is padding: no
state is read or written for it, and its output is undefined.
"""

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl

from quire.ops.triton.activations import softplus
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import USUAL
from quire.ops.triton.variants import Variant, types_of

VALUE_COLUMNS = 32
"""Columns of a state [key_dim, value_dim] that a program has: with 128 keys, 32 numbers a thread."""

_EPS = tl.constexpr(1e-6)


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
    starts_ptr,
    out_ptr,
    num_heads,
    share,
    key_dim,
    value_dim,
    most_tokens,
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
    """Some columns of the state of one head of one row; without `starts_ptr`, each row has one token.

    The grid is (rows, heads, blocks of `VALUES` columns). `FORM` is "delta" for `gated_delta_rule`, whose least decay
    is `low`; "ssd", whose steps are within `low` and `high`; or "lightning", whose logarithms of decays are `a_ptr`.
    Head h reads group h // share. Rows with more than `most_tokens` are left out. `IS_EVEN`: there are `KEYS` keys, and
    a multiple of `VALUES` columns.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        key_dim, value_dim = KEYS, value_dim // VALUES * VALUES
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    begin = row
    end = row + 1
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    if (slot < 0) | (end - begin > most_tokens):
        return
    group = head // share
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    is_there = is_key[:, None] & is_value[None, :]
    is_known = is_there & (tl.load(is_new_ptr + row) + keys * 0 == 0)[:, None]
    places = state_ptr + (slot * num_heads + head) * key_dim * value_dim + keys[:, None] * value_dim + values[None, :]
    state = tl.load(places, mask=is_known, other=0.0)
    a = tl.load(a_ptr + head)
    q_ptrs, k_ptrs = q_ptr + group * q_head_stride + keys, k_ptr + group * k_head_stride + keys
    v_ptrs, out_ptrs = v_ptr + head * v_head_stride + values, out_ptr + head * value_dim + values
    dt_ptrs, beta_ptrs = q_ptrs, q_ptrs
    dt_bias = 0.0
    d = 0.0
    if FORM != "lightning":
        if HAS_CHANNEL_DECAY:
            dt_ptrs = dt_ptr + head * dt_head_stride + keys
            dt_bias = tl.load(dt_bias_ptr + head * key_dim + keys, mask=is_key, other=0.0)
        else:
            dt_ptrs = dt_ptr + head * dt_head_stride
            dt_bias = tl.load(dt_bias_ptr + head)
    if FORM == "delta":
        beta_ptrs = beta_ptr + head
    if FORM == "ssd":
        d = tl.load(d_ptr + head)
    if starts_ptr is None:
        state = _add_token(
            state, row, q_ptrs, k_ptrs, v_ptrs, dt_ptrs, beta_ptrs, out_ptrs, q_stride, k_stride, v_stride, dt_stride,
            beta_stride, num_heads * value_dim, a, dt_bias, d, is_key, is_value, key_dim, low, high, beta_scale,
            FORM, HAS_CHANNEL_DECAY, HAS_LEAST_DECAY,
        )  # fmt: skip
    else:
        for token in range(begin, end):
            state = _add_token(
                state, token, q_ptrs, k_ptrs, v_ptrs, dt_ptrs, beta_ptrs, out_ptrs, q_stride, k_stride, v_stride,
                dt_stride, beta_stride, num_heads * value_dim, a, dt_bias, d, is_key, is_value, key_dim, low, high,
                beta_scale, FORM, HAS_CHANNEL_DECAY, HAS_LEAST_DECAY,
            )  # fmt: skip
    tl.store(places, state, mask=is_there)


@triton.jit
def _add_token(
    state,
    token,
    q_ptrs,
    k_ptrs,
    v_ptrs,
    dt_ptrs,
    beta_ptrs,
    out_ptrs,
    q_stride,
    k_stride,
    v_stride,
    dt_stride,
    beta_stride,
    out_stride,
    a,
    dt_bias,
    d,
    is_key,
    is_value,
    key_dim,
    low,
    high,
    beta_scale,
    FORM: tl.constexpr,
    HAS_CHANNEL_DECAY: tl.constexpr,
    HAS_LEAST_DECAY: tl.constexpr,
):
    """The state [keys, values] after a token, whose output is stored. Pointers are those of the first token."""
    q = tl.load(q_ptrs + token * q_stride, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(k_ptrs + token * k_stride, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(v_ptrs + token * v_stride, mask=is_value, other=0.0).to(tl.float32)
    if FORM == "delta":
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * tl.rsqrt(key_dim * 1.0))
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        beta = tl.sigmoid(tl.load(beta_ptrs + token * beta_stride).to(tl.float32)) * beta_scale
        decay = _decay(dt_ptrs + token * dt_stride, dt_bias, a, is_key, low, HAS_CHANNEL_DECAY, HAS_LEAST_DECAY)
        state = state * decay
        added = beta * (v - tl.sum(state * k[:, None], axis=0))
    elif FORM == "ssd":
        raw = tl.load(dt_ptrs + token * dt_stride).to(tl.float32) + dt_bias
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
        out += v * d
    tl.store(out_ptrs + token * out_stride, out.to(out_ptrs.dtype.element_ty), mask=is_value)
    return state


@triton.jit
def _decay(
    dt_ptrs, dt_bias, a, is_key, least, HAS_CHANNEL_DECAY: tl.constexpr, HAS_LEAST_DECAY: tl.constexpr
):  # fmt: skip
    """The decay of a head's state: one, or [keys, 1]."""
    if HAS_CHANNEL_DECAY:
        raw = tl.load(dt_ptrs, mask=is_key, other=0.0).to(tl.float32) + dt_bias
    else:
        raw = tl.load(dt_ptrs).to(tl.float32) + dt_bias
    log_decay = least * tl.sigmoid(raw * -a) if HAS_LEAST_DECAY else softplus(raw) * a
    decay = tl.exp(log_decay)
    return decay[:, None] if HAS_CHANNEL_DECAY else decay


def variants() -> Iterator[Variant]:
    """The forms of models with states of 128 keys, for decode steps and prompts."""
    delta: dict[str, object] = {"FORM": "delta", "d_ptr": None}
    ssd: dict[str, object] = {"FORM": "ssd", "beta_ptr": None, "HAS_CHANNEL_DECAY": False}
    known = dict.fromkeys(("a_ptr", "dt_bias_ptr", "d_ptr", "state_ptr"), "*fp32")
    known |= {"slots_ptr": "*i64", "is_new_ptr": "*u8", "starts_ptr": "*i64"}
    known |= dict.fromkeys(("low", "high", "beta_scale"), "fp32")
    common: dict[str, object] = {"VALUES": VALUE_COLUMNS, "HAS_LEAST_DECAY": False, "IS_EVEN": True, "KEYS": 128}
    forms = (delta | {"HAS_CHANNEL_DECAY": False}, delta | {"HAS_CHANNEL_DECAY": True}, ssd)
    for name, starts, form in product(USUAL, ({"starts_ptr": None}, {}), forms):
        constants = common | form | starts
        types = types_of(update_outer_products, constants, known, name)
        yield Variant(update_outer_products, types, constants, 4, 1, "32 numbers of the state a thread")

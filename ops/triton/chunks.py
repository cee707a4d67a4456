"""Prompts through states of decayed outer products, in chunks of 64 tokens whose products are matrix units'.

Mamba 2 and lightning attention, see arXiv:2405.21060, section 6. A program keeps some columns of a row's state in
registers, and takes the row's chunks one after another. The tokens of a chunk see one another through a matrix of 64 x
64 products.

Operands of products are bfloat16: states, and what is added to them, in two parts, which have 16 bits together. Sums
and states between chunks are float32. Rows of few tokens are left to `outer_products.py`, whose bits are those of
decode steps.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from quire.ops.triton.activations import softplus
from quire.ops.triton.launch import Kernel
from quire.ops.triton.tiles import UNIT
from quire.ops.triton.variants import Variant, types_of

CHUNK = 64
"""Tokens of a chunk: the rows of a wide matrix unit."""
LEAST_TOKENS = 17
"""Rows with fewer are not cut into chunks, so that drafts have the bits of decode steps."""
CHUNK_COLUMNS = 32
"""Columns of a state that a program has: 128 programs for one prompt, 32 heads and 128 columns."""
PASS_WARPS, PASS_STAGES = 8, 2
"""The next chunk is read while one is computed."""


@Kernel
def pass_chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_ptr,
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
    least_tokens,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dt_stride,
    dt_head_stride,
    low,
    high,
    FORM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some columns of the state of one head of one row, through the row's tokens.

    Arguments are those of `update_outer_products`. Rows with less than `least_tokens` are left out. `IS_EVEN`: also
    strides of tokens and heads are multiples of a load.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        key_dim, value_dim = KEYS, value_dim // VALUES * VALUES
        q_stride, q_head_stride = q_stride // UNIT * UNIT, q_head_stride // UNIT * UNIT
        k_stride, k_head_stride = k_stride // UNIT * UNIT, k_head_stride // UNIT * UNIT
        v_stride, v_head_stride = v_stride // UNIT * UNIT, v_head_stride // UNIT * UNIT
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (slot < 0) | (end - begin < least_tokens):
        return
    group = head // share
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    is_there = is_key[:, None] & is_value[None, :]
    is_known = is_there & (tl.load(is_new_ptr + row) + keys * 0 == 0)[:, None]
    places = state_ptr + (slot * num_heads + head) * key_dim * value_dim + keys[:, None] * value_dim + values[None, :]
    state = tl.load(places, mask=is_known, other=0.0)
    a = tl.load(a_ptr + head)
    dt_bias = 0.0
    d = 0.0
    if FORM != "lightning":
        dt_bias = tl.load(dt_bias_ptr + head)
    if FORM == "ssd":
        d = tl.load(d_ptr + head)
    lanes = tl.arange(0, CHUNK)
    is_earlier = lanes[:, None] >= lanes[None, :]
    for start in tl.range(begin, end, CHUNK):
        is_token = start + lanes < end
        key_mask, value_mask = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
        q_at = q_ptr + start * q_stride + group * q_head_stride
        q = tl.load(q_at + lanes[:, None] * q_stride + keys[None, :], mask=key_mask, other=0.0)
        k_at = k_ptr + start * k_stride + group * k_head_stride
        k = tl.load(k_at + lanes[:, None] * k_stride + keys[None, :], mask=key_mask, other=0.0)
        v_at = v_ptr + start * v_stride + head * v_head_stride
        v = tl.load(v_at + lanes[:, None] * v_stride + values[None, :], mask=value_mask, other=0.0).to(tl.float32)
        step, log_decay = decays_of_chunk(
            dt_ptr, (start + lanes) * dt_stride + head * dt_head_stride, is_token, dt_bias, a, low, high, FORM
        )  # fmt: skip
        sums, total = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        faded = tl.exp(sums)  # what is left of the state at the chunk's start
        left = tl.exp(total - sums)  # of a token, at the chunk's end
        between = tl.exp(tl.where(is_earlier, sums[:, None] - sums[None, :], float("-inf")))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * between
        old = product(q, state, tl.zeros([CHUNK, VALUES], tl.float32))
        added = v * step[:, None] if FORM == "ssd" else v
        out = old * faded[:, None]
        out = tl.dot(scores.to(q.dtype), added.to(q.dtype), out, input_precision="ieee")
        if FORM == "ssd":
            out += v * d
        out_at = out_ptr + (start * num_heads + head) * value_dim
        out_places = lanes[:, None] * (num_heads * value_dim) + values[None, :]
        tl.store(out_at + out_places, out.to(out_ptr.dtype.element_ty), mask=value_mask)
        state = product(tl.trans(k), added * left[:, None], state * tl.exp(total))
    tl.store(places, state, mask=is_there)


@triton.jit
def halves(x, dtype: tl.constexpr):
    """`x` as the sum of two tensors of a type with fewer bits."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def product(a, b, added):
    """The product of `a`, and of `b` in two parts, plus `added`."""
    high, low = halves(b, a.dtype)
    return tl.dot(a, low, tl.dot(a, high, added, input_precision="ieee"), input_precision="ieee")


@triton.jit
def decays_of_chunk(dt_ptr, places, is_token, dt_bias, a, low, high, FORM: tl.constexpr):
    """The time steps of a chunk's tokens, and the logarithms of their decays, which are 0 where there is no token."""
    if FORM == "lightning":
        step = is_token.to(tl.float32)
        log_decay = step * a
    else:
        raw = tl.load(dt_ptr + places, mask=is_token, other=0.0).to(tl.float32) + dt_bias
        step = tl.minimum(tl.maximum(softplus(raw), low), high)
        log_decay = step * a
    return step, tl.where(is_token, log_decay, 0.0)


def variants() -> Iterator[Variant]:
    """The forms of bfloat16 models with states of 128 keys."""
    known = dict.fromkeys(("a_ptr", "dt_bias_ptr", "d_ptr", "state_ptr"), "*fp32")
    known |= {"slots_ptr": "*i64", "is_new_ptr": "*u8", "starts_ptr": "*i64"}
    known |= dict.fromkeys(("low", "high"), "fp32")
    common: dict[str, object] = {"IS_EVEN": True, "KEYS": 128, "VALUES": CHUNK_COLUMNS, "CHUNK": CHUNK}
    for form in ({"FORM": "ssd"}, {"FORM": "lightning", "dt_ptr": None, "dt_bias_ptr": None, "d_ptr": None}):
        constants = common | form
        types = types_of(pass_chunks, constants, known)
        yield Variant(pass_chunks, types, constants, PASS_WARPS, PASS_STAGES, "with four warps, registers spill")

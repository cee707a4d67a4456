"""Prompts through the states of gated delta rules, in chunks of 64 tokens whose products are matrix units'.

A token adds `k ⊗ u` to a state, and its u depends on those of the tokens before it in the chunk: with the lower
triangle A of beta_i * decay_ij * (k_i · k_j), u = (1 + A)^-1 r, where r is what there would be without the others
(arXiv:2412.06464, section 3.3). One kernel solves this for all chunks at once, up to the part of r that the state has.
Then a program keeps some columns of a row's state in registers, and takes the row's chunks one after another.

Numbers are kept as in `chunks.py`. The inverse is built from those of blocks on the diagonal, twice as large each time,
because powers of A, of which a series would need the 32nd, may be large where keys are alike.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from quire.ops.triton.activations import softplus
from quire.ops.triton.chunks import CHUNK, halves, product
from quire.ops.triton.launch import Kernel
from quire.ops.triton.prompt_attention import find_row
from quire.ops.triton.tiles import UNIT
from quire.ops.triton.variants import Variant, types_of

SOLVE = {"VALUES": 64, "num_warps": 4, "num_stages": 1}
"""64 rows of four warps are a wide matrix unit's."""
PASS = {"VALUES": 16, "num_warps": 4, "num_stages": 2}
"""With more columns, registers spill. Two programs fit into a multiprocessor, and 256 are one prompt's with 32 heads
and 128 columns. The next chunk is read while one is computed.
"""
_EPS = tl.constexpr(1e-6)


@Kernel
def solve_chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_ptr,
    beta_ptr,
    slots_ptr,
    starts_ptr,
    units_ptr,
    scores_ptr,
    solved_keys_ptr,
    out_ptr,
    num_tokens,
    num_rows,
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
    beta_stride,
    least,
    beta_scale,
    HAS_LEAST_DECAY: tl.constexpr,
    IS_EVEN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """What one chunk of one head adds to its row's state, for `pass_delta_chunks`.

    With u of a state S: u = `out_ptr` - `solved_keys_ptr` · S, which are [num_tokens, heads, value_dim] and [...,
    key_dim]. `scores_ptr` [chunks, heads, CHUNK, CHUNK] has decayed products of queries and keys, `units_ptr` [2,
    num_tokens, key heads, key_dim] the scaled queries and keys.

    The grid is (chunks, heads): row r's first chunk is `starts[r] // CHUNK + r`. Rows with less than `least_tokens` are
    left out. `CHUNK` is 2 to the power `LEVELS`. Other arguments are those of `update_outer_products`; `IS_EVEN`: also
    strides of tokens and heads are multiples of a load.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        key_dim, value_dim = KEYS, value_dim // VALUES * VALUES
        q_stride, q_head_stride = q_stride // UNIT * UNIT, q_head_stride // UNIT * UNIT
        k_stride, k_head_stride = k_stride // UNIT * UNIT, k_head_stride // UNIT * UNIT
        v_stride, v_head_stride = v_stride // UNIT * UNIT, v_head_stride // UNIT * UNIT
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = find_row(starts_ptr, chunk, num_rows, CHUNK)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    start = begin + (chunk - (begin // CHUNK + row)) * CHUNK
    if (tl.load(slots_ptr + row) < 0) | (end - begin < least_tokens) | (start >= end):
        return
    lanes, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    is_token, is_key = start + lanes < end, keys < key_dim
    group, num_groups = head // share, num_heads // share
    mask = is_token[:, None] & is_key[None, :]
    q_at, k_at = q_ptr + start * q_stride + group * q_head_stride, k_ptr + start * k_stride + group * k_head_stride
    q = tl.load(q_at + lanes[:, None] * q_stride + keys[None, :], mask=mask, other=0.0)
    k = tl.load(k_at + lanes[:, None] * k_stride + keys[None, :], mask=mask, other=0.0)
    k_scales = _scales(k)
    q, k = _scaled(q, _scales(q) * tl.rsqrt(key_dim * 1.0)), _scaled(k, k_scales)
    if head % share == 0:
        units = units_ptr + ((start + lanes)[:, None] * num_groups + group) * key_dim + keys[None, :]
        tl.store(units, q, mask=mask)
        tl.store(units + num_tokens.to(tl.int64) * num_groups * key_dim, k, mask=mask)
    sums, _ = _decays(
        dt_ptr + (start + lanes) * dt_stride + head * dt_head_stride, is_token, tl.load(dt_bias_ptr + head),
        tl.load(a_ptr + head), least, HAS_LEAST_DECAY,
    )  # fmt: skip
    raw = tl.load(beta_ptr + (start + lanes) * beta_stride + head, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.sigmoid(raw) * beta_scale
    lower, upper = lanes[:, None], lanes[None, :]
    between = tl.exp(tl.where(lower >= upper, sums[:, None] - sums[None, :], float("-inf")))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * between
    places = (chunk * num_heads + head).to(tl.int64) * (CHUNK * CHUNK) + lower * CHUNK + upper
    tl.store(scores_ptr + places, scores.to(scores_ptr.dtype.element_ty))
    triangle = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta[:, None]
    inverse = (lower == upper).to(tl.float32)
    for level in tl.static_range(LEVELS):  # from blocks of 2^level to such of twice as many
        is_joined = ((lower >> level) > (upper >> level)) & ((lower >> (level + 1)) == (upper >> (level + 1)))
        joined = tl.where(is_joined, triangle, 0.0)
        if level == 0:
            inverse -= joined
        else:
            inverse -= _exact_product(inverse, _exact_product(joined, inverse, k.dtype), k.dtype)
    high, low = halves(inverse, k.dtype)
    rows = (start + lanes)[:, None] * num_heads + head
    for first in tl.range(0, key_dim, VALUES):  # read again, because registers do not hold all of them meanwhile
        columns = first + tl.arange(0, VALUES)
        some_mask = is_token[:, None] & (columns < key_dim)[None, :]
        some = tl.load(k_at + lanes[:, None] * k_stride + columns[None, :], mask=some_mask, other=0.0)
        solved = _split_product(high, low, _scaled(some, k_scales).to(tl.float32) * (beta * tl.exp(sums))[:, None])
        tl.store(solved_keys_ptr + rows * key_dim + columns[None, :], solved.to(k.dtype), mask=some_mask)
    for first in tl.range(0, value_dim, VALUES):
        values = first + tl.arange(0, VALUES)
        value_mask = is_token[:, None] & (values < value_dim)[None, :]
        v_at = v_ptr + start * v_stride + head * v_head_stride
        v = tl.load(v_at + lanes[:, None] * v_stride + values[None, :], mask=value_mask, other=0.0).to(tl.float32)
        added = _split_product(high, low, v * beta[:, None])
        tl.store(out_ptr + rows * value_dim + values[None, :], added.to(out_ptr.dtype.element_ty), mask=value_mask)


@Kernel
def pass_delta_chunks(
    units_ptr,
    scores_ptr,
    solved_keys_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    share,
    key_dim,
    value_dim,
    least_tokens,
    dt_stride,
    dt_head_stride,
    least,
    HAS_LEAST_DECAY: tl.constexpr,
    IS_EVEN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some columns of the state of one head of one row, through the row's tokens, after `solve_chunks`.

    The grid is (rows, heads, blocks of `VALUES` columns). The outputs replace what `out_ptr` has.
    """
    if IS_EVEN:  # tells the compiler, and changes nothing
        key_dim, value_dim = KEYS, value_dim // VALUES * VALUES
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (slot < 0) | (end - begin < least_tokens):
        return
    lanes, keys, values = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    is_there = is_key[:, None] & is_value[None, :]
    is_known = is_there & (tl.load(is_new_ptr + row) + keys * 0 == 0)[:, None]
    places = state_ptr + (slot * num_heads + head) * key_dim * value_dim + keys[:, None] * value_dim + values[None, :]
    state = tl.load(places, mask=is_known, other=0.0)
    a, dt_bias = tl.load(a_ptr + head), tl.load(dt_bias_ptr + head)
    num_groups = num_heads // share
    q_ptrs = units_ptr + (lanes[:, None] * num_groups + head // share) * key_dim + keys[None, :]
    k_ptrs = q_ptrs + num_tokens.to(tl.int64) * num_groups * key_dim
    solved_ptrs = solved_keys_ptr + (lanes[:, None] * num_heads + head) * key_dim + keys[None, :]
    out_ptrs = out_ptr + (lanes[:, None] * num_heads + head) * value_dim + values[None, :]
    score_ptrs = scores_ptr + ((begin // CHUNK + row) * num_heads + head) * (CHUNK * CHUNK)
    score_ptrs = score_ptrs + lanes[:, None] * CHUNK + lanes[None, :]
    dt_ptrs = dt_ptr + lanes * dt_stride + head * dt_head_stride
    for start in tl.range(begin, end, CHUNK):
        is_token = start + lanes < end
        mask, value_mask = is_token[:, None] & is_key[None, :], is_token[:, None] & is_value[None, :]
        solved = tl.load(solved_ptrs + start * num_heads * key_dim, mask=mask, other=0.0)
        added = tl.load(out_ptrs + start * num_heads * value_dim, mask=value_mask, other=0.0).to(tl.float32)
        added = product(-solved, state, added)
        q = tl.load(q_ptrs + start * num_groups * key_dim, mask=mask, other=0.0)
        sums, total = _decays(dt_ptrs + start * dt_stride, is_token, dt_bias, a, least, HAS_LEAST_DECAY)
        out = product(q, state, tl.zeros([CHUNK, VALUES], tl.float32)) * tl.exp(sums)[:, None]
        scores = tl.load(score_ptrs + (start - begin) * num_heads * CHUNK)
        out = tl.dot(scores, added.to(scores.dtype), out, input_precision="ieee")
        tl.store(out_ptrs + start * num_heads * value_dim, out.to(out_ptr.dtype.element_ty), mask=value_mask)
        k = tl.load(k_ptrs + start * num_groups * key_dim, mask=mask, other=0.0)
        state = product(tl.trans(k), added * tl.exp(total - sums)[:, None], state * tl.exp(total))
    tl.store(places, state, mask=is_there)


@triton.jit
def _decays(dt_ptrs, is_token, dt_bias, a, least, HAS_LEAST_DECAY: tl.constexpr):
    """The sums of the logarithms of a chunk's decays up to each token, and up to the last one."""
    raw = tl.load(dt_ptrs, mask=is_token, other=0.0).to(tl.float32) + dt_bias
    log_decay = least * tl.sigmoid(raw * -a) if HAS_LEAST_DECAY else softplus(raw) * a
    log_decay = tl.where(is_token, log_decay, 0.0)
    return tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)


@triton.jit
def _scales(x):
    """The factors of rows that give them unit length."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + _EPS)


@triton.jit
def _scaled(x, scales):
    return (x.to(tl.float32) * scales[:, None]).to(x.dtype)


@triton.jit
def _split_product(a_high, a_low, b):
    """The product of two float32 matrices in two parts each; that of both lower parts is left out."""
    b_high, b_low = halves(b, a_high.dtype)
    small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, input_precision="ieee"), input_precision="ieee")
    return tl.dot(a_high, b_high, small, input_precision="ieee")


@triton.jit
def _exact_product(a, b, dtype: tl.constexpr):
    high, low = halves(a, dtype)
    return _split_product(high, low, b)


def variants() -> Iterator[Variant]:
    """The forms of bfloat16 models with states of 128 keys."""
    known = dict.fromkeys(("a_ptr", "dt_bias_ptr", "state_ptr"), "*fp32") | dict.fromkeys(
        ("least", "beta_scale"), "fp32"
    )
    known |= {"slots_ptr": "*i64", "is_new_ptr": "*u8", "starts_ptr": "*i64"}
    common: dict[str, object] = {"HAS_LEAST_DECAY": False, "IS_EVEN": True, "KEYS": 128, "CHUNK": CHUNK}
    levels = CHUNK.bit_length() - 1
    for kernel, tiles, form in ((solve_chunks, SOLVE, {"LEVELS": levels}), (pass_delta_chunks, PASS, {})):
        constants = {**common, **form, "VALUES": tiles["VALUES"]}
        types, reason = types_of(kernel, constants, known), "more columns spill"
        yield Variant(kernel, types, constants, tiles["num_warps"], tiles["num_stages"], reason)

"""The matrix memory of xLSTM, see `RecurrentOperations.mlstm`.

Two kernels share the state: `weigh_tokens` has its last row and last column, which decide by how much a token fades the
memory, adds to it, and is divided; `remember_tokens` has all other columns, and applies these factors. So no program
reads what another writes. Both read a row's tokens one after another. A row whose slot is negative is padding.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.recurrent import StateRows
from quire.ops.triton.launch import Kernel
from quire.ops.triton.state_rows import as_bytes, starts_there, with_dense_tokens
from quire.ops.triton.tiles import USUAL
from quire.ops.triton.variants import Variant, types_of

_COLUMNS = 32
"""Columns of a memory [key_dim, value_dim] that a program has: with 256 keys and eight warps, 32 numbers a thread."""


@Kernel
def weigh_tokens(
    q_ptr,
    k_ptr,
    add_ptr,
    keep_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    factors_ptr,
    num_heads,
    key_dim,
    value_dim,
    q_stride,
    k_stride,
    add_stride,
    keep_stride,
    eps,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Factors [num_tokens, heads, 3] float32 of one head of one row: what is kept, what is added, and 1 / divisor.

    The grid is (rows, heads). `q` and `k` have dense heads.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    begin = row
    end = row + 1
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    if slot < 0:
        return
    keys = tl.arange(0, KEYS)
    is_key = keys < key_dim
    state_ptr += (slot * num_heads + head) * (key_dim + 1) * (value_dim + 1)
    is_new = tl.load(is_new_ptr + row)
    places = state_ptr + keys * (value_dim + 1) + value_dim
    norm = tl.load(places, mask=is_key & (is_new + keys * 0 == 0), other=0.0)
    most_place = state_ptr + (key_dim + 1) * (value_dim + 1) - 1
    most = tl.where(is_new == 0, tl.load(most_place), 0.0)
    scale = tl.rsqrt(key_dim * 1.0)
    for token in range(begin, end):
        q = tl.load(q_ptr + token * q_stride + head * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride + head * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        add = tl.load(add_ptr + token * add_stride + head).to(tl.float32)
        keep = tl.load(keep_ptr + token * keep_stride + head).to(tl.float32)
        log_keep = tl.minimum(keep, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(keep))) + most
        most = tl.maximum(log_keep, add)
        kept, added = tl.exp(log_keep - most), tl.exp(add - most)
        norm = kept * norm + added * k
        divisor = tl.maximum(tl.abs(tl.sum(norm * q, 0) * scale), tl.exp(-most)) + eps
        factors = factors_ptr + (token * num_heads + head) * 3
        tl.store(factors, kept)
        tl.store(factors + 1, added)
        tl.store(factors + 2, scale / divisor)
    tl.store(places, norm, mask=is_key)
    for start in range(0, value_dim, VALUES):  # nobody reads them, but they are numbers
        columns = start + tl.arange(0, VALUES)
        at = state_ptr + key_dim * (value_dim + 1) + columns
        tl.store(at, tl.zeros([VALUES], tl.float32), mask=columns < value_dim)
    tl.store(most_place, most)


@Kernel
def remember_tokens(
    q_ptr,
    k_ptr,
    v_ptr,
    factors_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    starts_ptr,
    out_ptr,
    num_heads,
    key_dim,
    value_dim,
    q_stride,
    k_stride,
    v_stride,
    IS_EVEN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Some columns of the memory of one head of one row. The grid is (rows, heads, blocks of `VALUES` columns)."""
    if IS_EVEN:  # tells the compiler, and changes nothing
        key_dim, value_dim = KEYS, value_dim // VALUES * VALUES
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    begin = row
    end = row + 1
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
    if slot < 0:
        return
    keys, values = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < key_dim, values < value_dim
    is_there = is_key[:, None] & is_value[None, :]
    is_known = is_there & (tl.load(is_new_ptr + row) + keys * 0 == 0)[:, None]
    state_ptr += (slot * num_heads + head) * (key_dim + 1) * (value_dim + 1)
    places = state_ptr + keys[:, None] * (value_dim + 1) + values[None, :]
    memory = tl.load(places, mask=is_known, other=0.0)
    for token in range(begin, end):
        q = tl.load(q_ptr + token * q_stride + head * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride + head * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        v_at = v_ptr + token * v_stride + head * value_dim + values
        v = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32)
        factors = factors_ptr + (token * num_heads + head) * 3
        kept, added, share = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
        memory = kept * memory + (added * k)[:, None] * v[None, :]
        out = tl.sum(memory * q[:, None], 0) * share
        out_at = out_ptr + (token * num_heads + head) * value_dim + values
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_value)
    tl.store(places, memory, mask=is_there)


def remember(
    q: Tensor, k: Tensor, v: Tensor, add: Tensor, keep: Tensor, state: Tensor, rows: StateRows, eps: float
) -> Tensor:
    """Computes `RecurrentOperations.mlstm`."""
    q, k, v, add, keep = map(with_dense_tokens, (q, k, v, add, keep))
    (num_tokens, num_heads, key_dim), value_dim = q.shape, v.shape[2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    factors = torch.empty(num_tokens, num_heads, 3, dtype=torch.float32, device=v.device)
    of_rows = (state, rows.slots, as_bytes(rows.is_new), starts_there(q, rows))
    num_rows, keys = len(rows.slots), triton.next_power_of_2(key_dim)
    sizes = num_heads, key_dim, value_dim
    weigh_tokens(
        (num_rows, num_heads), q, k, add, keep, *of_rows, factors, *sizes, q.stride(0), k.stride(0), add.stride(0),
        keep.stride(0), eps, KEYS=keys, VALUES=_COLUMNS, num_stages=1,
    )  # fmt: skip
    remember_tokens(
        (num_rows, num_heads, triton.cdiv(value_dim, _COLUMNS)), q, k, v, factors, *of_rows, out, *sizes, q.stride(0),
        k.stride(0), v.stride(0), IS_EVEN=key_dim == keys and value_dim % _COLUMNS == 0, KEYS=keys, VALUES=_COLUMNS,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


def variants() -> Iterator[Variant]:
    """The forms of xLSTM-7B, whose keys have 256 numbers, for decode steps and prompts."""
    known = {"state_ptr": "*fp32", "factors_ptr": "*fp32", "eps": "fp32"}
    known |= {"slots_ptr": "*i64", "is_new_ptr": "*u8", "starts_ptr": "*i64"}
    common: dict[str, object] = {"KEYS": 256, "VALUES": _COLUMNS}
    for name, starts in product(USUAL, ({"starts_ptr": None}, {})):
        constants = common | starts
        yield Variant(weigh_tokens, types_of(weigh_tokens, constants, known, name), constants, 4, 1, "2 keys a thread")
        constants = {**constants, "IS_EVEN": True}
        types = types_of(remember_tokens, constants, known, name)
        yield Variant(remember_tokens, types, constants, 8, 1, "32 numbers of the memory a thread")

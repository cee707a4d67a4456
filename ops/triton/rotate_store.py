"""What happens between a layer's projection and its attention: norms, rotation and the KV cache, in one kernel."""

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.backend import NewHeads
from quire.ops.cache_rows import in_octets, row_size
from quire.ops.triton.chain import start_next, wait_for_inputs
from quire.ops.triton.kv_rows import (
    MAX_HEAD_DIM,
    PLAIN_KINDS,
    QUANTIZED_FORMS,
    has_kernels,
    kind_of,
    page_shift,
    store_rows,
)
from quire.ops.triton.launch import Kernel
from quire.ops.triton.rotation import TOKEN_ALIGNMENT, cache_rows, rotated_heads
from quire.ops.triton.tiles import USUAL
from quire.ops.triton.variants import Variant

BLOCK_HEADS = 4
"""Heads of a program: a request of 48 heads is 12 programs, and no program computes much in turn."""

_TOKEN_ALIGNMENT = tl.constexpr(TOKEN_ALIGNMENT)


def covers(x: Tensor, kv_cache: Tensor) -> bool:
    """Returns True if the kernels of this file store heads `x` [num_tokens, heads, head_dim] in this cache."""
    return x.dtype in PLAIN_KINDS and x.shape[2] <= MAX_HEAD_DIM and has_kernels(kv_cache, x.shape[2])


def rotate_and_store(new: NewHeads) -> Tensor:
    """Runs `Backend.rotate_and_store`. Slots below 0 are not written."""
    heads, kv_cache, cos = aligned(new.heads), new.kv_cache, new.cos.contiguous()
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads = kv_cache.shape[2]
    num_heads = num_all - 2 * num_kv_heads
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    if not num_tokens:
        return q
    weight, eps = new.norm or (None, 0.0)
    rotate_and_store_heads(
        (num_tokens, triton.cdiv(num_all, BLOCK_HEADS)),
        heads, q, cos, new.sin.contiguous(), in_octets(kv_cache), new.slot_mapping, weight, new.scales,
        heads.stride(0), kv_cache.stride(0), page_shift(kv_cache), num_heads, num_kv_heads, float(eps),
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), ROTARY_DIM=cos.shape[-1],
        IS_INTERLEAVED=new.is_interleaved, ROW=kv_cache.shape[4], KIND=kind_of(kv_cache.dtype),
        BLOCK_HEADS=BLOCK_HEADS, num_warps=num_warps(head_dim), num_stages=1,
    )  # fmt: skip
    return q


def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None) -> None:
    """Runs `Backend.write_kv`. Slots below 0 are not written."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    k, v = aligned(k), aligned(v)
    write_heads(
        (num_tokens, triton.cdiv(num_kv_heads, BLOCK_HEADS), 2),
        k, v, in_octets(kv_cache), slot_mapping, scales,
        k.stride(0), v.stride(0), kv_cache.stride(0), page_shift(kv_cache), num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), ROW=kv_cache.shape[4],
        KIND=kind_of(kv_cache.dtype), BLOCK_HEADS=BLOCK_HEADS, num_warps=num_warps(head_dim), num_stages=1,
    )  # fmt: skip


def num_warps(head_dim: int) -> int:
    """So many warps that a thread reads eight numbers at once: 16 bytes of half precision."""
    return max(1, BLOCK_HEADS * triton.next_power_of_2(head_dim) // (8 * 32))


def aligned(x: Tensor) -> Tensor:
    """Copies heads that do not lie as the kernels say: side by side, where wide loads start."""
    is_dense = x.stride()[1:] == (x.shape[2], 1)
    return x if is_dense and x.stride(0) % TOKEN_ALIGNMENT == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


@Kernel
def rotate_and_store_heads(
    heads_ptr,
    q_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    weight_ptr,
    scales_ptr,
    token_stride,
    page_stride,
    page_shift,
    num_heads,
    num_kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """A program computes BLOCK_HEADS heads of one token: any of queries, keys and values."""
    start_next()
    wait_for_inputs()
    token, head = tl.program_id(0), tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    num_rotated = num_heads + num_kv_heads
    columns = tl.arange(0, BLOCK_D)
    is_head = head < num_rotated + num_kv_heads
    row_ptr = heads_ptr + token.to(tl.int64) * tl.multiple_of(token_stride.to(tl.int64), _TOKEN_ALIGNMENT)
    x = rotated_heads(
        row_ptr, head, is_head, head < num_rotated, token, cos_ptr, sin_ptr, weight_ptr, eps,
        HEAD_DIM, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED,
    )  # fmt: skip
    q_places = (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(q_ptr + q_places, x, mask=(head < num_heads)[:, None] & (columns < HEAD_DIM)[None, :])
    if (tl.program_id(1) + 1) * BLOCK_HEADS > num_heads:
        slot = tl.load(slots_ptr + token)
        kv_head = head - num_heads  # values lie behind keys, in the token's heads and in the page
        is_stored = (kv_head >= 0) & (kv_head < tl.where(slot >= 0, 2 * num_kv_heads, 0))
        rows, scale_rows = cache_rows(slot, kv_head, page_stride, page_shift, ROW, KIND)
        fixed = tl.full((BLOCK_HEADS,), 1.0, tl.float32)
        if scales_ptr is not None:
            fixed = tl.load(scales_ptr + kv_head, mask=is_stored, other=1.0)
        store_rows(
            cache_ptr, rows, scale_rows, x.to(tl.float32), is_stored, fixed, HEAD_DIM, BLOCK_D, KIND,
            scales_ptr is not None,
        )  # fmt: skip


@Kernel
def write_heads(
    k_ptr,
    v_ptr,
    cache_ptr,
    slots_ptr,
    scales_ptr,
    k_token_stride,
    v_token_stride,
    page_stride,
    page_shift,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """A program stores BLOCK_HEADS keys of one token, or as many values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_D)
    is_head = head < num_kv_heads
    mask = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    if tl.program_id(2) == 0:
        row_ptr = k_ptr + token * tl.multiple_of(k_token_stride.to(tl.int64), _TOKEN_ALIGNMENT)
        x = tl.load(row_ptr + head[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        row_ptr = v_ptr + token * tl.multiple_of(v_token_stride.to(tl.int64), _TOKEN_ALIGNMENT)
        x = tl.load(row_ptr + head[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    kv_head = head + tl.program_id(2) * num_kv_heads
    rows, scale_rows = cache_rows(slot, kv_head, page_stride, page_shift, ROW, KIND)
    fixed = tl.full((BLOCK_HEADS,), 1.0, tl.float32)
    if scales_ptr is not None:
        fixed = tl.load(scales_ptr + kv_head, mask=is_head, other=1.0)
    is_stored = head < tl.where(slot >= 0, num_kv_heads, 0)
    store_rows(cache_ptr, rows, scale_rows, x, is_stored, fixed, HEAD_DIM, BLOCK_D, KIND, scales_ptr is not None)


def variants() -> Iterator[Variant]:
    """Lists the kernels for the usual heads, which are rotated whole."""
    for name, head_dim, has_norm in itertools.product(USUAL, (64, 128, 256, 512), (False, True)):
        yield _variant(name, head_dim, None, has_norm=has_norm, has_scales=False)
    for (dtype, has_scales), head_dim, has_norm in itertools.product(QUANTIZED_FORMS, (64, 128, 256), (False, True)):
        yield _variant(USUAL[0], head_dim, dtype, has_norm=has_norm, has_scales=has_scales)


def _variant(name: str, head_dim: int, cache_dtype: torch.dtype | None, *, has_norm: bool, has_scales: bool) -> Variant:
    """`cache_dtype` is that of a quantized cache."""
    kind = "" if cache_dtype is None else kind_of(cache_dtype)
    tensors = dict.fromkeys(("heads_ptr", "q_ptr", "cos_ptr", "sin_ptr", "cache_ptr", "weight_ptr"), f"*{name}")
    sizes = ("token_stride", "page_stride", "page_shift", "num_heads", "num_kv_heads")
    types = {**tensors, "slots_ptr": "*i64", "scales_ptr": "*fp32", **dict.fromkeys(sizes, "i32"), "eps": "fp32"}
    if cache_dtype is not None:
        types["cache_ptr"] = "*u8"
    constants: dict[str, object] = {
        "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "ROTARY_DIM": head_dim, "IS_INTERLEAVED": False,
        "ROW": head_dim if cache_dtype is None else row_size(head_dim, cache_dtype), "KIND": kind or "plain",
        "BLOCK_HEADS": BLOCK_HEADS,
    }  # fmt: skip
    for pointer, is_there in (("weight_ptr", has_norm), ("scales_ptr", has_scales)):
        if not is_there:
            del types[pointer]
            constants[pointer] = None
    reason = "eight numbers a thread: one load of 16 bytes"
    return Variant(rotate_and_store_heads, types, constants, num_warps(head_dim), 1, reason, kind)

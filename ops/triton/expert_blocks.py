"""Blocks of tokens for experts: each token's choices, sorted by expert, in blocks of one size that have one expert.

Nothing of it is known on the host: there are as many blocks as there can be at most, and those left over are empty.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import Kernel
from quire.ops.triton.variants import Variant

_CHUNK = 1024
_WARPS = 8
_STAGES = 3
_FEW_EXPERTS, _MANY_EXPERTS = 64, 512
_AT_ONCE = 4096
"""Choices that one program sorts: a launch more costs as much as some rounds of its loop."""


class Blocks(NamedTuple):
    """Choices in blocks. A choice is the number of a token's id among all ids of all tokens.

    Attributes:
        experts: [num_blocks] int32; -1: no choice is in this block.
        members: [num_blocks, size] int32; the choices, in any order; -1: none. None: block n has choice n alone.
        size: choices of a block.
    """

    experts: Tensor
    members: Tensor | None
    size: int


@triton.jit
def _clear(experts_ptr, members_ptr, num_blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    places = tl.arange(0, CHUNK)
    for first in range(0, num_blocks, CHUNK):
        tl.store(experts_ptr + first + places, -1, mask=first + places < num_blocks)
    for first in range(0, num_blocks * BLOCK, CHUNK):
        tl.store(members_ptr + first + places, -1, mask=first + places < num_blocks * BLOCK)


@triton.jit
def _rank(first, ids_ptr, counts_ptr, ranks_ptr, num_choices, CHUNK: tl.constexpr):
    """Numbers the choices of each expert, in any order: the place in its block changes nothing in a token's result."""
    choices = first + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + choices, mask=choices < num_choices, other=-1).to(tl.int32)
    ranks = tl.atomic_add(counts_ptr + ids, 1, mask=ids >= 0)
    tl.store(ranks_ptr + choices, ranks, mask=choices < num_choices)


@triton.jit
def _find_starts(counts_ptr, starts_ptr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Stores each expert's first block."""
    experts = tl.arange(0, EXPERTS)
    blocks = tl.cdiv(tl.load(counts_ptr + experts, cache_modifier=".cg"), BLOCK)
    tl.store(starts_ptr + experts, tl.cumsum(blocks, axis=0) - blocks)


@triton.jit
def _place(
    first, ids_ptr, ranks_ptr, starts_ptr, experts_ptr, members_ptr, num_choices, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    choices = first + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + choices, mask=choices < num_choices, other=-1).to(tl.int32)
    is_here = ids >= 0
    ranks = tl.load(ranks_ptr + choices, mask=is_here, other=0, cache_modifier=".cg")
    blocks = tl.load(starts_ptr + ids, mask=is_here, other=0, cache_modifier=".cg") + ranks // BLOCK
    tl.store(members_ptr + blocks * BLOCK + ranks % BLOCK, choices, mask=is_here)
    tl.store(experts_ptr + blocks, ids, mask=is_here & (ranks % BLOCK == 0))


@Kernel
def sort_choices(
    ids_ptr,
    counts_ptr,
    starts_ptr,
    ranks_ptr,
    experts_ptr,
    members_ptr,
    num_choices,
    num_blocks,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Puts choices into blocks, in one program. `counts_ptr` and `starts_ptr` have room for `EXPERTS`."""
    tl.store(counts_ptr + tl.arange(0, EXPERTS), 0)
    _clear(experts_ptr, members_ptr, num_blocks, BLOCK, CHUNK)
    tl.debug_barrier()
    for first in range(0, num_choices, CHUNK):
        _rank(first, ids_ptr, counts_ptr, ranks_ptr, num_choices, CHUNK)
    tl.debug_barrier()
    _find_starts(counts_ptr, starts_ptr, BLOCK, EXPERTS)
    tl.debug_barrier()
    for first in range(0, num_choices, CHUNK):
        _place(first, ids_ptr, ranks_ptr, starts_ptr, experts_ptr, members_ptr, num_choices, BLOCK, CHUNK)


@Kernel
def rank_choices(ids_ptr, counts_ptr, ranks_ptr, num_choices, CHUNK: tl.constexpr):
    """Numbers the choices of each expert; a program for each `CHUNK`. `counts_ptr` begins as zeros."""
    _rank(tl.program_id(0) * CHUNK, ids_ptr, counts_ptr, ranks_ptr, num_choices, CHUNK)


@Kernel
def find_starts(
    counts_ptr, starts_ptr, experts_ptr, members_ptr, num_blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Finds each expert's first block, and empties all blocks."""
    _find_starts(counts_ptr, starts_ptr, BLOCK, EXPERTS)
    _clear(experts_ptr, members_ptr, num_blocks, BLOCK, CHUNK)


@Kernel
def place_choices(
    ids_ptr, ranks_ptr, starts_ptr, experts_ptr, members_ptr, num_choices, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Puts the choices into their experts' blocks; a program for each `CHUNK`."""
    first = tl.program_id(0) * CHUNK
    _place(first, ids_ptr, ranks_ptr, starts_ptr, experts_ptr, members_ptr, num_choices, BLOCK, CHUNK)


def variants() -> Iterator[Variant]:
    """The forms that decode steps need; a block has up to 64 choices there."""
    scalars = dict.fromkeys(("num_choices", "num_blocks"), "i32")
    pointers = dict.fromkeys(("counts_ptr", "starts_ptr", "ranks_ptr", "experts_ptr", "members_ptr"), "*i32")
    for places, size in product((_FEW_EXPERTS, _MANY_EXPERTS), (16, 32, 64)):
        constants = {"BLOCK": size, "EXPERTS": places, "CHUNK": _CHUNK}
        types = scalars | pointers | {"ids_ptr": "*i64"}
        yield Variant(sort_choices, types, constants, _WARPS, _STAGES, "one program, four choices a thread")


def count_blocks(num_choices: int, num_experts: int, size: int) -> int:
    """Returns the number of blocks that `num_choices` fill at most."""
    used = min(num_choices, num_experts)
    return used + (num_choices - used) // size


def sort_by_expert(ids: Tensor, num_experts: int, size: int) -> Blocks:
    """Puts the choices `ids` [num_tokens, top_k] int64 into blocks of `size`; those of -1 are in none."""
    num_choices = ids.numel()
    num_blocks = count_blocks(num_choices, num_experts, size)
    places = _FEW_EXPERTS if num_experts <= _FEW_EXPERTS else max(_MANY_EXPERTS, triton.next_power_of_2(num_experts))

    def allocate(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    counts, starts, ranks = allocate(places), allocate(places), allocate(num_choices)
    experts, members = allocate(num_blocks), allocate(num_blocks, size)
    common = {"BLOCK": size, "CHUNK": _CHUNK, "num_warps": _WARPS, "num_stages": _STAGES}
    if num_choices <= _AT_ONCE:
        sort_choices(
            (1,), ids, counts, starts, ranks, experts, members, num_choices, num_blocks,
            EXPERTS=places, **common,
        )  # fmt: skip
        return Blocks(experts, members, size)
    chunks = (triton.cdiv(num_choices, _CHUNK),)
    rank_choices(chunks, ids, counts.zero_(), ranks, num_choices, CHUNK=_CHUNK, num_warps=_WARPS, num_stages=_STAGES)
    find_starts((1,), counts, starts, experts, members, num_blocks, EXPERTS=places, **common)
    place_choices(chunks, ids, ranks, starts, experts, members, num_choices, **common)
    return Blocks(experts, members, size)

"""Low-rank products of adapters (LoRA): inputs to a few numbers a token, and these to what is added to outputs.

A program takes the tokens of a block by their adapters, of which it knows nothing before: so no size depends on them,
and a graph can hold both kernels. A token's result depends on its own adapter alone. As Punica's kernels
(arXiv:2310.18547), but on matrix units, and without sorting: a prompt's tokens stand together anyway.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.linear import LowRankWeights
from quire.ops.triton.launch import Kernel
from quire.ops.triton.linear import MAX_TOKENS, aligned, is_aligned
from quire.ops.triton.tiles import UNIT, USUAL, are_whole
from quire.ops.triton.variants import Variant, types_of

_NONE = tl.constexpr(1 << 62)
"""Above all adapters."""
_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK_IN = 128
_LARGEST_SPLIT = 8
_RANKS = (16, 64)
"""Rows of a tile: of adapters with the usual ranks, and of others."""


class Tiles(NamedTuple):
    """Tokens of a block, columns of outputs, warps and stages.

    A decode step reads each adapter's weights once a block. The tokens of prompts fill a wide matrix unit.
    """

    BLOCK_TOKENS: int
    BLOCK_COLUMNS: int
    num_warps: int
    num_stages: int


_FEW, _MANY = Tiles(16, 128, 4, 4), Tiles(64, 64, 4, 3)


@Kernel
def shrink_inputs(
    x_ptr,
    a_ptr,
    ranks_ptr,
    adapters_ptr,
    inner_ptr,
    num_tokens,
    in_features,
    rank,
    num_rows,
    x_stride,
    split,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """`x @ a[adapter].T` of each token, by parts of the inputs: `inner_ptr` is [split, num_tokens, layers, tiles] of
    `BLOCK_ROWS` float32 numbers.

    The grid is (tiles of each layer's `rank` rows, blocks of tokens, split). Nothing is written for tokens without an
    adapter. `in_features` and the stride are multiples of 8.
    """
    in_features, x_stride = in_features // UNIT * UNIT, x_stride // UNIT * UNIT
    num_tiles, part = tl.cdiv(rank, BLOCK_ROWS), tl.program_id(2)
    layer, first_row = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles * BLOCK_ROWS
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    rows, inputs = first_row + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_IN)
    is_token, is_row = tokens < num_tokens, rows < rank
    own = tl.load(adapters_ptr + tokens, mask=is_token, other=-1)
    values = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    steps = tl.cdiv(in_features, BLOCK_IN)
    total = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
    adapter = _next_adapter(own, -1)
    while adapter < _NONE:
        used = rank
        if ranks_ptr is not None:
            used = tl.load(ranks_ptr + adapter).to(tl.int32)
        if first_row < used:
            weights = a_ptr + (adapter * num_rows + layer * rank + rows)[None, :] * in_features + inputs[:, None]
            inner = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
            for step in tl.range(part * steps // split, (part + 1) * steps // split):
                first = step * BLOCK_IN
                known = inputs < in_features - first
                x = tl.load(values + first, mask=is_token[:, None] & known[None, :], other=0.0)
                weight = tl.load(weights + first, mask=known[:, None] & is_row[None, :], other=0.0)
                inner = tl.dot(x, weight, inner, input_precision="ieee")
            total = tl.where((own == adapter)[:, None], inner, total)
        adapter = _next_adapter(own, adapter)
    width = tl.num_programs(0) * BLOCK_ROWS
    places = (part * num_tokens + tokens).to(tl.int64)[:, None] * width
    places += tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    tl.store(inner_ptr + places, total, mask=(own >= 0)[:, None])


@Kernel
def expand_to_outputs(
    inner_ptr,
    b_ptr,
    ranks_ptr,
    adapters_ptr,
    factors_ptr,
    shifts_ptr,
    tiles_ptr,
    out_ptr,
    num_tokens,
    rank,
    num_layers,
    num_columns,
    out_stride,
    split,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Adds the products of `inner_ptr` with `b[adapter]` to `out_ptr`, then scales and shifts; rounds once.

    The grid is (tiles of columns, blocks of tokens). `tiles_ptr` [tiles, 3] has each tile's layer, first column, and
    the end of its layer's columns. Sizes of layers and the stride are multiples of 8.
    """
    num_columns, out_stride = num_columns // UNIT * UNIT, out_stride // UNIT * UNIT
    tile = tiles_ptr + 3 * tl.program_id(0)
    layer, first, end = tl.load(tile), tl.load(tile + 1) // UNIT * UNIT, tl.load(tile + 2) // UNIT * UNIT
    width = tl.cdiv(rank, BLOCK_ROWS) * BLOCK_ROWS
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    own = tl.load(adapters_ptr + tokens, mask=tokens < num_tokens, other=-1)
    is_column = columns < end
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    adapter = _next_adapter(own, -1)
    while adapter < _NONE:
        used = rank
        if ranks_ptr is not None:
            used = tl.load(ranks_ptr + adapter).to(tl.int32)
        added = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
        for first_row in tl.range(0, used, BLOCK_ROWS):
            rows = first_row + tl.arange(0, BLOCK_ROWS)
            inner = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
            for part in range(split):
                places = ((part * num_tokens + tokens).to(tl.int64)[:, None] * num_layers + layer) * width
                inner += tl.load(inner_ptr + places + rows[None, :], mask=(own == adapter)[:, None], other=0.0)
            weights = b_ptr + (adapter * rank + rows)[:, None] * num_columns + columns[None, :]
            weight = tl.load(weights, mask=(rows < used)[:, None] & is_column[None, :], other=0.0)
            added = tl.dot(inner.to(weight.dtype), weight, added, input_precision="ieee")
        total = tl.where((own == adapter)[:, None], added, total)
        adapter = _next_adapter(own, adapter)
    is_changed = (own >= 0)[:, None] & is_column[None, :]
    outs = out_ptr + tokens.to(tl.int64)[:, None] * out_stride + columns[None, :]
    result = tl.load(outs, mask=is_changed, other=0.0).to(tl.float32) + total
    if factors_ptr is not None:
        places = own[:, None] * num_columns + columns[None, :]
        result = result * tl.load(factors_ptr + places, mask=is_changed, other=0.0)
        result += tl.load(shifts_ptr + places, mask=is_changed, other=0.0)
    tl.store(outs, result.to(out_ptr.dtype.element_ty), mask=is_changed)


@triton.jit
def _next_adapter(own, last):
    """The least adapter after the `last` one, of those that tokens have; `_NONE` if there is none."""
    return tl.min(tl.where(own > last, own, _NONE), axis=0)


class LowRankProducts:
    """Products with adapters, on any device."""

    def __init__(self, *, is_invariant: bool = False) -> None:
        """`is_invariant`: a row's bits are the same for all numbers of rows, not only up to `MAX_TOKENS`."""
        self._is_invariant = is_invariant
        self._tables: dict[tuple[torch.device, tuple[int, ...], int], Tensor] = {}

    def add(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> bool:
        """Runs `Backend.add_low_rank` in place, or returns False if no kernel does."""
        a, b, sizes, ranks, factors, shifts = weights
        if not _is_covered(x, out, weights):
            return False
        x, adapters = aligned(x), adapters.contiguous()
        num_tokens, (_, num_rows, in_features), rank = len(x), a.shape, b.shape[1]
        tiles = _FEW if num_tokens <= MAX_TOKENS or self._is_invariant else _MANY
        split = choose_split(in_features) if tiles is _FEW else 1
        num_blocks, block_rows = triton.cdiv(num_tokens, tiles.BLOCK_TOKENS), _RANKS[rank > _RANKS[0]]
        num_tiles = len(sizes) * triton.cdiv(rank, block_rows)
        inner = x.new_empty(split, num_tokens, num_tiles, block_rows, dtype=torch.float32)
        form = {"BLOCK_TOKENS": tiles.BLOCK_TOKENS, "BLOCK_ROWS": block_rows, "num_warps": tiles.num_warps}
        shrink_inputs(
            (num_tiles, num_blocks, split), x, a, ranks, adapters, inner, num_tokens,
            in_features, rank, num_rows, x.stride(0), split, BLOCK_IN=_BLOCK_IN, num_stages=tiles.num_stages, **form,
        )  # fmt: skip
        table = self._table(x.device, sizes, tiles.BLOCK_COLUMNS)
        expand_to_outputs(
            (len(table), num_blocks), inner, b, ranks, adapters, factors, shifts, table, out, num_tokens, rank,
            len(sizes), b.shape[2], out.stride(0), split, BLOCK_COLUMNS=tiles.BLOCK_COLUMNS, num_stages=1, **form,
        )  # fmt: skip
        return True

    def _table(self, device: torch.device, sizes: tuple[int, ...], block: int) -> Tensor:
        """[tiles, 3] int32 of `expand_to_outputs`: tiles of `block` columns, each of one layer."""
        key = device, sizes, block
        if key not in self._tables:  # a step is captured after it has run, so this is no copy of a graph
            ends = torch.tensor(sizes).cumsum(0).tolist()
            tiles = [
                (layer, first, end)
                for layer, (end, size) in enumerate(zip(ends, sizes, strict=True))
                for first in range(end - size, end, block)
            ]
            self._tables[key] = torch.tensor(tiles, dtype=torch.int32, device=device)
        return self._tables[key]


def choose_split(in_features: int) -> int:
    """Chooses into how many parts inputs are split, by the weight's shape alone: four steps of a program each."""
    return min(_LARGEST_SPLIT, triton.cdiv(in_features, 4 * _BLOCK_IN))


def _is_covered(x: Tensor, out: Tensor, weights: LowRankWeights) -> bool:
    a, b, sizes = weights.a, weights.b, weights.sizes
    return (
        len(x) > 0
        and x.dtype in _DTYPES
        and x.dtype == a.dtype == b.dtype == out.dtype
        and are_whole(a.shape[2], *sizes)
        and is_aligned(out)
    )


def variants() -> Iterator[Variant]:
    """The forms of decode steps and prompts, for small and large ranks."""
    known = {"adapters_ptr": "*i64", "ranks_ptr": "*i64", "tiles_ptr": "*i32"}
    known |= dict.fromkeys(("inner_ptr", "factors_ptr", "shifts_ptr"), "*fp32")
    for name, tiles, rows in product(USUAL, (_FEW, _MANY), _RANKS):
        common: dict[str, object] = {"BLOCK_TOKENS": tiles.BLOCK_TOKENS, "BLOCK_ROWS": rows}
        shrunk = {**common, "BLOCK_IN": _BLOCK_IN}
        types, reason = types_of(shrink_inputs, shrunk, known, name), "ranks of a tile, and 128 inputs a step"
        yield Variant(shrink_inputs, types, shrunk, tiles.num_warps, tiles.num_stages, reason)
        for absent in ({"factors_ptr": None, "shifts_ptr": None}, {}):
            expanded = {**common, "BLOCK_COLUMNS": tiles.BLOCK_COLUMNS, **absent}
            types, reason = types_of(expand_to_outputs, expanded, known, name), "with more columns, registers spill"
            yield Variant(expand_to_outputs, types, expanded, tiles.num_warps, 1, reason)

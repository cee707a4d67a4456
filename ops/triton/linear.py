"""Linear layers of few tokens, as kernels that read each weight once; products of more tokens are torch's."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.backend import Activation
from quire.ops.triton.activations import activate_and_mul
from quire.ops.triton.launch import Kernel

MAX_TOKENS = 128
"""With more tokens, a product is bound by arithmetic rather than by the weight's bytes."""

BLOCK_IN = 128
"""Inputs that a program multiplies at once. It is the same for all numbers of tokens, as is a sum's order."""

PlainWeight = tuple[Tensor, Tensor | None]
"""A weight [out, in], and a bias [out]."""

_LARGEST_SPLIT = 8
_PROGRAMS = 128
_MULTIPLIED = (torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """How a product is cut into programs.

    A program multiplies `BLOCK_ROWS` outputs of the weight, the rows of the tensor cores' product, with `BLOCK_TOKENS`
    tokens, its columns: so there are 64 rows, as `wgmma` needs, for any number of tokens.

    Attributes:
        SPLIT: parts of the inputs, each of which is a program's.
    """

    BLOCK_TOKENS: int
    BLOCK_ROWS: int
    SPLIT: int
    num_warps: int
    num_stages: int


# The stages of two programs fit into the 227 kB of a multiprocessor of sm_90. With few tokens, 64 kB of a program's
# weight are in flight. With 128 tokens, one program fits; of 128 rows, it reads the tokens half as often.
_TILES = (Tiles(16, 64, 1, 4, 5), Tiles(32, 64, 1, 4, 4), Tiles(64, 64, 1, 4, 3), Tiles(128, 64, 1, 4, 4))
_MANY = Tiles(128, 128, 1, 8, 3)


def choose_tiles(num_tokens: int, out_features: int, in_features: int) -> Tiles:
    """Chooses the tiles for `num_tokens`, of at most `MAX_TOKENS`.

    The split depends on the weight's shape alone, so that all numbers of tokens have the same sums. It is the smallest
    that gives nearly every multiprocessor of a large card a program: more parts would only add partial sums.
    """
    split, programs = 1, triton.cdiv(out_features, 64)
    while split < _LARGEST_SPLIT and programs < _PROGRAMS and in_features >= 4 * split * BLOCK_IN:
        split, programs = 2 * split, 2 * programs
    tiles = next(each for each in _TILES if num_tokens <= each.BLOCK_TOKENS)
    if num_tokens > 64 and programs >= 2 * _PROGRAMS:
        tiles = _MANY
    return tiles._replace(SPLIT=split)


@Kernel
def multiply_few(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """`x @ weight.T + bias`, and then, with an `ACTIVATION`, the activation of gates and ups.

    The grid is (tiles of outputs, SPLIT). `in_features` and `x_stride` are multiples of 8.
    """
    in_features, x_stride = in_features // 8 * 8, x_stride // 8 * 8  # so that the compiler knows
    part = tl.program_id(1)
    rows = weight_rows(out_features, BLOCK_ROWS, ACTIVATION is not None)
    tokens = tl.arange(0, BLOCK_TOKENS)
    inputs = tl.arange(0, BLOCK_IN)
    weights = weight_ptr + rows.to(tl.int64)[:, None] * in_features + inputs[None, :]
    values = x_ptr + tokens.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    steps = tl.cdiv(in_features, BLOCK_IN)
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for step in range(part * steps // SPLIT, (part + 1) * steps // SPLIT):
        first = step * BLOCK_IN
        known = inputs < in_features - first
        weight = tl.load(weights + first, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(values + first, mask=known[:, None] & (tokens < num_tokens)[None, :], other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
    finish(
        total, rows, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_tokens, out_features,
        ACTIVATION, BLOCK_TOKENS, BLOCK_ROWS, SPLIT,
    )  # fmt: skip


@triton.jit
def weight_rows(out_features, BLOCK_ROWS: tl.constexpr, IS_GATED: tl.constexpr):
    """The rows of the weight [out_features, in] that this program multiplies; past the end, the last one again.

    Those of a gated layer are 8 gates, their 8 ups, the next gates: a thread then has both in its registers.
    """
    tile, rows = tl.program_id(0), tl.arange(0, BLOCK_ROWS)
    if IS_GATED:
        size = out_features // 2
        gates = tile * (BLOCK_ROWS // 2) + rows // 16 * 8 + rows % 8
        return tl.minimum(gates, size - 1) + rows // 8 % 2 * size
    else:
        return tl.minimum(tile * BLOCK_ROWS + rows, out_features - 1)


@triton.jit
def finish(
    total,
    rows,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    num_tokens,
    out_features,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Stores this program's `total`, or that of all parts of the inputs, if this program is the last of them.

    The parts are added in their order, whichever is last. `partials_ptr` is [SPLIT, tiles, num_tokens, BLOCK_ROWS]
    float32; `counters_ptr` is [tiles] int32, zero before and after.
    """
    if SPLIT == 1:
        _store(total, rows, bias_ptr, out_ptr, num_tokens, out_features, ACTIVATION, BLOCK_TOKENS, BLOCK_ROWS)
    else:
        tile, tiles = tl.program_id(0), tl.num_programs(0)
        tokens = tl.arange(0, BLOCK_TOKENS)
        places = tokens[None, :] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        known = (tokens < num_tokens)[None, :]
        own = tl.program_id(1) * tiles + tile
        tl.store(partials_ptr + own * num_tokens * BLOCK_ROWS + places, total, mask=known)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
            for part in tl.static_range(SPLIT):
                partials = partials_ptr + (part * tiles + tile) * num_tokens * BLOCK_ROWS
                total += tl.load(partials + places, mask=known, other=0.0, cache_modifier=".cg")
            _store(total, rows, bias_ptr, out_ptr, num_tokens, out_features, ACTIVATION, BLOCK_TOKENS, BLOCK_ROWS)
            tl.store(counters_ptr + tile, 0)


@triton.jit
def _store(
    total,
    rows,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if ACTIVATION is None:
        _store_block(total, out_ptr, num_tokens, out_features, BLOCK_TOKENS, BLOCK_ROWS)
    else:  # gates and ups are rounded, as those of a layer without activation
        rounded = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        halves = tl.permute(tl.reshape(rounded, (BLOCK_ROWS // 16, 2, 8, BLOCK_TOKENS)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        out = tl.reshape(activate_and_mul(gate, up, ACTIVATION), (BLOCK_ROWS // 2, BLOCK_TOKENS))
        _store_block(out, out_ptr, num_tokens, out_features // 2, BLOCK_TOKENS, BLOCK_ROWS // 2)


@triton.jit
def _store_block(out, out_ptr, num_tokens, size, BLOCK_TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr):
    tokens, outs = tl.arange(0, BLOCK_TOKENS), tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    places = out_ptr + tokens.to(tl.int64)[None, :] * size + outs[:, None]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=(outs < size)[:, None] & (tokens < num_tokens)[None, :])


class TritonLinear:
    """Keeps weight and bias unchanged."""

    layout = "plain"
    packed_types: tuple[type, ...] = ()

    def __init__(self) -> None:
        self._counters: dict[torch.device, Tensor] = {}

    def pack(self, weight: Tensor, bias: Tensor | None) -> PlainWeight:
        return weight, bias

    def plain(self, packed: PlainWeight) -> Tensor:
        return packed[0]

    def multiply(self, x: Tensor, packed: PlainWeight) -> Tensor:
        """As `LinearLayers.multiply`, for up to `MAX_TOKENS` rows."""
        return self._few(x, *packed, None) if is_few(x, packed[0]) else F.linear(x, *packed)

    def multiply_gated(self, x: Tensor, packed: PlainWeight, activation: Activation) -> Tensor | None:
        """Runs `Backend.gated_linear`, or returns None if no kernel does."""
        return self._few(x, *packed, activation) if is_few(x, packed[0]) else None

    def _few(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
        num_tokens, (out_features, in_features) = len(x), weight.shape
        x = x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
        tiles = choose_tiles(num_tokens, out_features, in_features)
        num_tiles = triton.cdiv(out_features, tiles.BLOCK_ROWS)
        out = x.new_empty(num_tokens, out_features if activation is None else out_features // 2)
        partials = x.new_empty(tiles.SPLIT * num_tiles * num_tokens * tiles.BLOCK_ROWS, dtype=torch.float32)
        multiply_few(
            (num_tiles, tiles.SPLIT),
            x, weight, bias, out, partials, self._counters_of(x.device),
            num_tokens, out_features, in_features, x.stride(0),
            ACTIVATION=activation, BLOCK_IN=BLOCK_IN, **tiles._asdict(),
        )  # fmt: skip
        return out

    def _counters_of(self, device: torch.device) -> Tensor:
        """Counts of the programs that have stored their part; zero whenever a kernel begins."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
        return self._counters[device]


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Returns True if a kernel multiplies `x` [num_tokens, in] by `weight` [out, in]."""
    return (
        0 < len(x) <= MAX_TOKENS
        and x.dtype == weight.dtype
        and x.dtype in _MULTIPLIED
        and is_aligned(weight)
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
    )


def is_aligned(x: Tensor) -> bool:
    """Returns True if threads can read each row of `x` [rows, size], 16 bytes at a time."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0

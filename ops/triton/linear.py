"""Linear layers of few tokens, as kernels that read each weight once; products of more tokens are torch's.

With `QUIRE_BATCH_INVARIANT=1`, those of more tokens are a kernel's as well, which adds in the same order.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.triton.arch import arch_of
from quire.ops.triton.chain import LINE, prefetch, start_next, wait_for_inputs
from quire.ops.triton.launch import Kernel
from quire.ops.triton.outputs import Places, finish, store_outputs, weight_rows
from quire.ops.triton.specialization import POINTER_TYPES
from quire.ops.triton.variants import Variant

MAX_TOKENS = 128
"""With more tokens, a product is bound by arithmetic rather than by the weight's bytes."""

BLOCK_IN = 128
"""Inputs that a program multiplies at once. It is the same for all numbers of tokens, as is a sum's order."""

PlainWeight = tuple[Tensor, Tensor | None]
"""A weight [out, in], and a bias [out]."""

FUSED: tuple[Activation, ...] = ("silu", "gelu_tanh")
"""The activations of gated layers in one kernel with their product. The others are rare, and kernels of their own."""

PREFETCHED_LINES = tl.constexpr(8)
_LARGEST_SPLIT = 8
_PROGRAMS = 128
MAX_PROGRAMS = 512
"""A weight whose inputs are split has fewer tiles of outputs."""
_MULTIPLIED = (torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """How a product is cut into programs.

    A program multiplies `BLOCK_ROWS` outputs of the weight, the rows of the tensor cores' product, with `BLOCK_TOKENS`
    tokens, its columns: so there are 64 rows, as `wgmma` needs, for any number of tokens.
    """

    BLOCK_TOKENS: int
    BLOCK_ROWS: int
    num_warps: int
    num_stages: int

    def stage_bytes(self) -> int:
        """Shared memory of one stage: 16-bit numbers of the weight and of the tokens."""
        return 2 * (self.BLOCK_TOKENS + self.BLOCK_ROWS) * BLOCK_IN

    def constants(self) -> dict[str, object]:
        return {"BLOCK_TOKENS": self.BLOCK_TOKENS, "BLOCK_ROWS": self.BLOCK_ROWS}

    def reason(self) -> str:
        in_flight = 2 * self.BLOCK_ROWS * BLOCK_IN * (self.num_stages - 1)
        return f"{self.BLOCK_ROWS} rows for wgmma, {in_flight >> 10} kB of the weight in flight"


# The stages of two programs fit into the 227 kB of a multiprocessor of sm_90. With few tokens, 64 kB of a program's
# weight are in flight. With 128 tokens, one program fits; of 128 rows, it reads the tokens half as often.
_TILES = (Tiles(16, 64, 4, 5), Tiles(32, 64, 4, 4), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 4))
_MANY = Tiles(128, 128, 8, 3)


def choose_tiles(num_tokens: int, out_features: int, shared_bytes: int) -> Tiles:
    """Chooses the tiles for `num_tokens`, of at most `MAX_TOKENS`, on a card of so much shared memory a program."""
    tiles = next(each for each in _TILES if num_tokens <= each.BLOCK_TOKENS)
    if tiles is _TILES[-1] and out_features >= 2 * _PROGRAMS * 64 and 2 * _MANY.stage_bytes() <= shared_bytes:
        tiles = _MANY
    return tiles._replace(num_stages=min(tiles.num_stages, shared_bytes // tiles.stage_bytes()))


def choose_split(out_features: int, in_features: int, num_programs: int = _PROGRAMS) -> int:
    """Chooses into how many parts a weight's inputs are split, for at least `num_programs` programs.

    They depend on the weight's shape alone, so that all numbers of tokens have the same sums. They are the fewest that
    give nearly every multiprocessor of a large card a program: more would only add partial sums.
    """
    split, programs = 1, triton.cdiv(out_features, 64)
    while split < _LARGEST_SPLIT and programs < num_programs and in_features >= 4 * split * BLOCK_IN:
        split, programs = 2 * split, 2 * programs
    return split


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
    out_stride,
    split,
    num_biases,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """`x @ weight.T + bias`, and then, with an `ACTIVATION`, the activation of gates and ups.

    The grid is (tiles of outputs, split). `in_features` and the strides are multiples of 8. `num_biases` is
    `out_features`, or 0 without biases.
    """
    in_features, x_stride = in_features // 8 * 8, x_stride // 8 * 8  # so that the compiler knows
    part = tl.program_id(1)
    start_next()
    rows = weight_rows(out_features, BLOCK_ROWS, ACTIVATION is not None)
    tokens, inputs = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_IN)
    weights = weight_ptr + rows.to(tl.int64)[:, None] * in_features + inputs[None, :]
    values = x_ptr + tokens[None, :] * x_stride + inputs[:, None]
    steps = tl.cdiv(in_features, BLOCK_IN)
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    prefetch_weight(weight_ptr, rows, part * steps // split * BLOCK_IN, in_features)
    wait_for_inputs()
    for step in range(part * steps // split, (part + 1) * steps // split):
        first = step * BLOCK_IN
        known = inputs < in_features - first
        weight = tl.load(weights + first, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(values + first, mask=known[:, None] & (tokens < num_tokens)[None, :], other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
    finish(
        total, rows, bias_ptr, out_ptr, partials_ptr, counters_ptr, num_tokens, out_stride, split, num_biases,
        ACTIVATION, BLOCK_TOKENS, BLOCK_ROWS,
    )  # fmt: skip


@Kernel
def multiply_many(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    out_stride,
    split,
    num_biases,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """As `multiply_few`; the grid is (tiles of outputs, blocks of tokens), and a program takes all parts itself.

    A part's sum is made by itself and then added to those before it, which is how `finish` adds them.
    """
    in_features, x_stride = in_features // 8 * 8, x_stride // 8 * 8  # so that the compiler knows
    first_token = tl.program_id(1) * BLOCK_TOKENS
    rows = weight_rows(out_features, BLOCK_ROWS, ACTIVATION is not None)
    tokens, inputs = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_IN)
    num_tokens -= first_token
    x_ptr += first_token.to(tl.int64) * x_stride
    weights = weight_ptr + rows.to(tl.int64)[:, None] * in_features + inputs[None, :]
    values = x_ptr + tokens[None, :] * x_stride + inputs[:, None]
    steps = tl.cdiv(in_features, BLOCK_IN)
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for part in range(split):
        own = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        for step in range(part * steps // split, (part + 1) * steps // split):
            first = step * BLOCK_IN
            known = inputs < in_features - first
            weight = tl.load(weights + first, mask=known[None, :], other=0.0)
            x = tl.load(values + first, mask=known[:, None] & (tokens < num_tokens)[None, :], other=0.0)
            own = tl.dot(weight, x, own, input_precision="ieee")
        total += own
    out_ptr += first_token.to(tl.int64) * (out_stride // 8 * 8)
    store_outputs(total, rows, bias_ptr, out_ptr, num_tokens, out_stride, num_biases, ACTIVATION)


@triton.jit
def prefetch_weight(weight_ptr, rows, first, in_features):
    """Fetches the beginning of this program's part of the weight, 1 kB of each row, while other kernels run."""
    places = tl.minimum(first + tl.arange(0, PREFETCHED_LINES) * LINE, in_features - 1)
    prefetch(weight_ptr + rows.to(tl.int64)[:, None] * in_features + places[None, :])


def variants() -> Iterator[Variant]:
    """The forms of the kernel that a large card may need; a smaller one has fewer stages."""
    scalars = ("num_tokens", "out_features", "in_features", "x_stride", "out_stride", "split", "num_biases")
    for dtype, activation, tiles in product(_MULTIPLIED, (None, *FUSED), (*_TILES, _MANY)):
        pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), POINTER_TYPES[dtype])
        constants = {"ACTIVATION": activation, "BLOCK_IN": BLOCK_IN, **tiles.constants()}
        shape = (tiles.num_warps, tiles.num_stages, tiles.reason())
        whole = {"partials_ptr": None, "counters_ptr": None}
        yield Variant(multiply_few, pointers | dict.fromkeys(scalars, "i32"), constants | whole, *shape)
        if tiles is _MANY:
            yield Variant(multiply_many, pointers | dict.fromkeys(scalars, "i32"), constants, *shape)
        else:  # products of so many outputs are not split
            parts = {"partials_ptr": "*fp32", "counters_ptr": "*i32"}
            yield Variant(multiply_few, pointers | parts | dict.fromkeys(scalars, "i32"), constants, *shape)


class TritonLinear:
    """Keeps weight and bias unchanged."""

    layout = "plain"
    packed_types: tuple[type, ...] = ()

    def __init__(self, *, is_invariant: bool = False) -> None:
        """`is_invariant`: a row's bits are the same for all numbers of rows, not only up to `MAX_TOKENS`."""
        self.is_invariant = is_invariant
        self._cards: dict[torch.device, _Card] = {}

    def pack(self, weight: Tensor, bias: Tensor | None) -> PlainWeight:
        return weight, bias if bias is None or bias.data_ptr() % 16 == 0 else bias.clone()

    def plain(self, packed: PlainWeight) -> Tensor:
        return packed[0]

    def multiply(self, x: Tensor, packed: PlainWeight) -> Tensor:
        """As `LinearLayers.multiply`, for up to `MAX_TOKENS` rows."""
        if not self._has_kernel(x, packed[0]):
            return F.linear(x, *packed)
        return self._few(x, *packed, None) if len(x) <= MAX_TOKENS else self._many(x, *packed, None)

    def multiply_gated(self, x: Tensor, packed: PlainWeight, activation: Activation) -> Tensor | None:
        """Runs `Backend.gated_linear`, or returns None if no kernel does."""
        if activation not in FUSED or not self._has_kernel(x, packed[0]):
            return None
        return self._few(x, *packed, activation) if len(x) <= MAX_TOKENS else self._many(x, *packed, activation)

    def _has_kernel(self, x: Tensor, weight: Tensor) -> bool:
        return is_few(x, weight) or (self.is_invariant and len(x) > MAX_TOKENS and is_multiplied(x, weight))

    def _many(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
        out_features, in_features = weight.shape
        x = aligned(x)
        size = out_features if activation is None else out_features // 2
        out = x.new_empty(len(x), -(-size // 8) * 8)
        num_stages = max(1, min(_MANY.num_stages, self.shared_bytes(x.device) // _MANY.stage_bytes()))
        multiply_many(
            (triton.cdiv(out_features, _MANY.BLOCK_ROWS), triton.cdiv(len(x), _MANY.BLOCK_TOKENS)),
            x, weight, weight if bias is None else bias, out,
            len(x), out_features, in_features, x.stride(0), out.stride(0), choose_split(*weight.shape),
            0 if bias is None else out_features,
            ACTIVATION=activation, BLOCK_IN=BLOCK_IN, **_MANY._replace(num_stages=num_stages)._asdict(),
        )  # fmt: skip
        return out if size == out.shape[1] else out[:, :size].contiguous()

    def _few(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
        out_features, in_features = weight.shape
        x = aligned(x)
        tiles = choose_tiles(len(x), out_features, self.shared_bytes(x.device))
        places = self.places(x, tiles.BLOCK_ROWS, out_features, choose_split(*weight.shape), activation)
        multiply_few(
            places.grid,
            x, weight, weight if bias is None else bias, places.out, places.partials, places.counters,
            len(x), out_features, in_features, x.stride(0), places.out.stride(0), places.grid[1],
            0 if bias is None else out_features,
            ACTIVATION=activation, BLOCK_IN=BLOCK_IN, **tiles._asdict(),
        )  # fmt: skip
        return places.result()

    def places(
        self, x: Tensor, block_rows: int, out_features: int, split: int, activation: Activation | None
    ) -> Places:
        """Allocates the results and the sums of parts of a kernel that ends with `finish`."""
        num_tiles = triton.cdiv(out_features, block_rows)
        size = out_features if activation is None else out_features // 2
        out = x.new_empty(len(x), -(-size // 8) * 8)
        if split == 1:
            return Places((num_tiles, 1), size, out, None, None)
        partials = x.new_empty(split * num_tiles * len(x) * block_rows, dtype=torch.float32)
        return Places((num_tiles, split), size, out, partials, self._card(x.device).counters)

    def shared_bytes(self, device: torch.device) -> int:
        """Shared memory that a program may have."""
        return self._card(device).shared_bytes

    def _card(self, device: torch.device) -> "_Card":
        if device not in self._cards:
            counters = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
            major, minor = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
            self._cards[device] = _Card(counters, arch_of(f"sm_{major}{minor}").max_shared_bytes)
        return self._cards[device]


class _Card(NamedTuple):
    """What the kernels need of a device.

    Attributes:
        counters: counts of the programs that have stored their part; zero whenever a kernel begins.
        shared_bytes: shared memory that a program may have.
    """

    counters: Tensor
    shared_bytes: int


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Returns True if the kernel of few tokens multiplies `x` [num_tokens, in] by `weight` [out, in]."""
    return 0 < len(x) <= MAX_TOKENS and is_multiplied(x, weight)


def is_multiplied(x: Tensor, weight: Tensor) -> bool:
    """Returns True if kernels multiply numbers of these types, that lie as these do."""
    return (
        x.dtype == weight.dtype
        and x.dtype in _MULTIPLIED
        and is_aligned(weight)
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
    )


def is_aligned(x: Tensor) -> bool:
    """Returns True if threads can read each row of `x` [rows, size], 16 bytes at a time."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """Returns `x`, or a copy of it that is aligned."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)

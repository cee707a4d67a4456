"""What programs of a product with a weight do with their sums: parts are added, biases and activations applied."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.activations import activate_and_mul


class Places(NamedTuple):
    """Where a kernel that ends with `finish` stores.

    Attributes:
        grid: tiles of outputs, and parts of the inputs.
        size: of a token's outputs.
        out: [num_tokens, size rounded up to a multiple of 8].
        partials: as in `finish`.
        counters: as in `finish`.
    """

    grid: tuple[int, int]
    size: int
    out: Tensor
    partials: Tensor | None
    counters: Tensor | None

    def result(self) -> Tensor:
        """[num_tokens, size]."""
        return self.out if self.size == self.out.shape[1] else self.out[:, : self.size].contiguous()


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
    out_stride,
    split,
    num_biases,
    ACTIVATION: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Stores this program's `total`, or that of all parts of the inputs, if this program is the last of them.

    The parts are added in their order, whichever is last. `partials_ptr` is [split, tiles, num_tokens, BLOCK_ROWS]
    float32; `counters_ptr` is [tiles] int32, zero before and after. Both are None for a split of 1.
    """
    if partials_ptr is not None:
        tile, tiles = tl.program_id(0), tl.num_programs(0)
        tokens = tl.arange(0, BLOCK_TOKENS)
        places = partials_ptr + tokens[None, :] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        size = num_tokens * BLOCK_ROWS
        tl.store(places + (tl.program_id(1) * tiles + tile) * size, total, mask=(tokens < num_tokens)[None, :])
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == split - 1:
            total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
            for first in range(0, split, 4):
                for part in tl.static_range(4):  # four loads under way
                    place = places + ((first + part) * tiles + tile) * size
                    count = tl.where(first + part < split, num_tokens, 0)
                    total += tl.load(place, mask=(tokens < count)[None, :], other=0.0, cache_modifier=".cg")
            store_outputs(total, rows, bias_ptr, out_ptr, num_tokens, out_stride, num_biases, ACTIVATION)
            tl.store(counters_ptr + tile, 0)
    else:
        store_outputs(total, rows, bias_ptr, out_ptr, num_tokens, out_stride, num_biases, ACTIVATION)


@triton.jit
def store_outputs(total, rows, bias_ptr, out_ptr, num_tokens, out_stride, num_biases, ACTIVATION: tl.constexpr):
    """Adds the biases to `total` [BLOCK_ROWS, BLOCK_TOKENS], applies the activation, and stores the outputs."""
    total += tl.load(bias_ptr + rows, mask=rows < num_biases, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is None:
        _store_block(total, out_ptr, num_tokens, out_stride)
    else:  # gates and ups are rounded, as those of a layer without activation
        BLOCK_OUT: tl.constexpr = total.shape[0] // 2
        rounded = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        halves = tl.permute(tl.reshape(rounded, (BLOCK_OUT // 8, 2, 8, total.shape[1])), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        out = tl.reshape(activate_and_mul(gate, up, ACTIVATION), (BLOCK_OUT, total.shape[1]))
        _store_block(out, out_ptr, num_tokens, out_stride)


@triton.jit
def _store_block(out, out_ptr, num_tokens, out_stride):
    out_stride = out_stride // 8 * 8
    tokens, outs = tl.arange(0, out.shape[1]), tl.program_id(0) * out.shape[0] + tl.arange(0, out.shape[0])
    places = out_ptr + tokens[None, :] * out_stride + outs[:, None]
    known = (outs < out_stride)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=known)

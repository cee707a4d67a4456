"""Mixture of experts: blocks of tokens that chose the same expert times its weights, gates and ups, then downs, and the
sum of each token's experts. No size depends on the choices, so a graph can hold it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.eager.experts import GroupedExperts, GroupedLinear
from quire.ops.experts import ExpertCall
from quire.ops.linear import LowRankWeights
from quire.ops.quantized import QuantizedWeight
from quire.ops.triton.activations import activate, activate_and_mul
from quire.ops.triton.adapted_experts import AdaptedChoices
from quire.ops.triton.expert_blocks import Blocks, sort_by_expert
from quire.ops.triton.expert_weights import load_weights, scale_weights
from quire.ops.triton.launch import Kernel
from quire.ops.triton.variants import Variant

_BLOCK_IN = 64
_COLUMNS = 1024
_DTYPES = (torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """How a product is cut into programs: `BLOCK_ROWS` outputs of one expert times the tokens of one block.

    The outputs are the rows of the tensor cores' product, and 64 of them are `wgmma` whatever the number of tokens is.
    All inputs of an output are one program's, in the same order in every tile: a token's result depends on no others.
    """

    BLOCK_TOKENS: int
    BLOCK_ROWS: int
    BLOCK_IN: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """The kernel's constants among them."""
        return {"BLOCK_TOKENS": self.BLOCK_TOKENS, "BLOCK_ROWS": self.BLOCK_ROWS, "BLOCK_IN": self.BLOCK_IN}


def choose_tiles(block_tokens: int, *, is_quantized: bool) -> Tiles:
    """Chooses the tiles of a product.

    Of few tokens, the weights are what is read: 8 kB a stage, and with two or three programs 80 to 120 kB in flight on
    a multiprocessor. Of many, 128 outputs and tokens, so that each element is multiplied 128 times. Dequantized weights
    go through registers, and codes are few bytes, so fewer stages are enough.
    """
    if block_tokens > 64:
        return Tiles(block_tokens, 128, _BLOCK_IN, 8, 3)
    if is_quantized:
        return Tiles(block_tokens, 64, _BLOCK_IN, 4, 4)
    return Tiles(block_tokens, 64, _BLOCK_IN, 4, 6 if block_tokens <= 32 else 5)


def choose_block(num_choices: int, num_experts: int) -> int:
    """Chooses the tokens of a block by those that an expert gets on average, with some room for the popular ones."""
    average = num_choices / num_experts
    return 16 if average <= 8 else 32 if average <= 24 else 64 if average <= 96 else 128


@Kernel
def multiply_experts(
    x_ptr,
    weight_ptr,
    table_ptr,
    scales_ptr,
    offsets_ptr,
    order_ptr,
    bias_ptr,
    factors_ptr,
    experts_ptr,
    members_ptr,
    out_ptr,
    size,
    num_rows,
    first_up,
    num_biases,
    first_up_bias,
    in_features,
    row_stride,
    num_groups,
    x_stride,
    out_stride,
    top_k,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    SPAN: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One linear layer of each choice's expert, and its activation: `size` columns of `out_ptr` [num_choices, ...].

    The grid is (tiles of outputs, blocks); the tiles of a block run together, so that its tokens are in the cache.
    Without `members_ptr`, a block is one choice, and `experts_ptr` the experts of all choices, int64.

    `x_ptr` has a row for each `top_k` choices, which `factors_ptr` multiply. `weight_ptr` is [experts, num_rows,
    row_stride] elements, or bytes; `bias_ptr` is [experts, num_biases]. Ups begin at `first_up` and `first_up_bias`.
    `IS_EVEN`: the inputs are a multiple of `BLOCK_IN`, and rows are aligned.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    places = tl.arange(0, BLOCK_TOKENS)
    if members_ptr is None:
        members = tl.where(places == 0, block, -1)
    else:
        members = tl.load(members_ptr + block * BLOCK_TOKENS + places)
    is_member = members >= 0
    if IS_EVEN:  # tells the compiler, and changes nothing
        x_stride, row_stride = x_stride // 8 * 8, row_stride // 32 * 32
    outputs, is_up = _outputs(tile, size, BLOCK_ROWS, IS_GATED)
    rows = outputs + is_up * first_up
    inputs = tl.arange(0, BLOCK_IN)
    values = x_ptr + tl.where(is_member, members // top_k, 0).to(tl.int64)[None, :] * x_stride
    weights = weight_ptr + expert * num_rows * row_stride
    groups = expert * num_rows * num_groups
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for first in range(0, in_features, BLOCK_IN):
        known = in_features - first
        weight = load_weights(weights, table_ptr, rows, row_stride, first, inputs, known, IS_EVEN, BLOCK_IN)
        if scales_ptr is not None:
            weight = scale_weights(
                weight, scales_ptr, offsets_ptr, groups, rows, first, inputs, known, num_groups,
                in_features // num_groups, SPAN, BLOCK_IN,
            ).to(x_ptr.dtype.element_ty)  # fmt: skip
        if order_ptr is None:
            columns = (first + inputs)[:, None]
        else:
            order = order_ptr + expert * in_features + first + inputs
            columns = tl.load(order, mask=inputs < known, other=0)[:, None]
        is_known = is_member[None, :] if IS_EVEN else (inputs < known)[:, None] & is_member[None, :]
        x = tl.load(values + columns, mask=is_known, other=0.0)
        if factors_ptr is not None:
            factors = tl.load(factors_ptr + members, mask=is_member, other=0.0)
            x = (x.to(tl.float32) * factors[None, :]).to(x_ptr.dtype.element_ty)
        total = tl.dot(weight, x, total)
    if bias_ptr is not None:
        biases = bias_ptr + expert * num_biases + outputs + is_up * first_up_bias
        total += tl.load(biases).to(tl.float32)[:, None]
    if IS_GATED:
        pairs = tl.permute(tl.reshape(total, (BLOCK_ROWS // 16, 2, 8, BLOCK_TOKENS)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        out = tl.reshape(activate_and_mul(gate, up, ACTIVATION), (BLOCK_ROWS // 2, BLOCK_TOKENS))
        _store(out, out_ptr, tile, members, size, out_stride, BLOCK_ROWS // 2)
    else:
        out = total if ACTIVATION is None else activate(total, ACTIVATION)
        _store(out, out_ptr, tile, members, size, out_stride, BLOCK_ROWS)


@triton.jit
def _outputs(tile, size, BLOCK_ROWS: tl.constexpr, IS_GATED: tl.constexpr):
    """The outputs of a tile's rows, and 1 for ups; past the end, the last one again.

    The rows of gated layers are 8 gates, their 8 ups, the next gates: a thread then has both in its registers.
    """
    rows = tl.arange(0, BLOCK_ROWS)
    if IS_GATED:
        return tl.minimum(tile * (BLOCK_ROWS // 2) + rows // 16 * 8 + rows % 8, size - 1), rows // 8 % 2
    else:
        return tl.minimum(tile * BLOCK_ROWS + rows, size - 1), rows * 0


@triton.jit
def _store(out, out_ptr, tile, members, size, out_stride, ROWS: tl.constexpr):
    columns = tile * ROWS + tl.arange(0, ROWS)
    places = out_ptr + members.to(tl.int64)[None, :] * out_stride + columns[:, None]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=(columns < size)[:, None] & (members >= 0)[None, :])


@Kernel
def sum_experts(
    parts_ptr, ids_ptr, weights_ptr, out_ptr, size, stride, top_k, IS_WEIGHTED: tl.constexpr,
    IS_EVEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums the rows of a token's choices in order: `parts_ptr` [num_tokens * top_k, stride] → [num_tokens, size].

    The grid is (tokens, blocks of `COLUMNS`). Rows of choices with the id -1 are not read. `IS_EVEN`: rows are aligned.
    """
    if IS_EVEN:
        size, stride = size // 8 * 8, stride // 8 * 8
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < size
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in range(top_k):
        choice = token * top_k + place
        ids = tl.load(ids_ptr + choice + columns * 0)
        part = tl.load(parts_ptr + choice * stride + columns, mask=is_column & (ids >= 0), other=0.0).to(tl.float32)
        total += part * tl.load(weights_ptr + choice) if IS_WEIGHTED else part
    tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


def variants() -> Iterator[Variant]:
    """The forms for layers that most mixtures of experts have: aligned rows, silu, and weights of 16, 8 or 4 bits."""
    weights = {
        "*bf16": dict.fromkeys(("table_ptr", "scales_ptr", "offsets_ptr"), None),
        "*fp16": dict.fromkeys(("table_ptr", "scales_ptr", "offsets_ptr"), None),
        "*fp8e4nv": {"table_ptr": None, "scales_ptr": "*fp32", "offsets_ptr": None},
        "*u8": {"table_ptr": "*fp32", "scales_ptr": "*bf16", "offsets_ptr": None},
    }
    scalars = [name for name in multiply_experts.parameters if name.islower() and not name.endswith("_ptr")]
    common = {"order_ptr": None, "factors_ptr": None, "bias_ptr": None, "SPAN": _BLOCK_IN, "IS_EVEN": True}
    for weight, parts in weights.items():
        dtype = weight if weight in ("*bf16", "*fp16") else "*bf16"
        for block, is_gated in product((None, 16, 32, 64, 128), (True, False)):
            tiles = choose_tiles(block or 16, is_quantized=dtype != weight)
            types = dict.fromkeys(scalars, "i32") | {"x_ptr": dtype, "weight_ptr": weight, "out_ptr": dtype}
            types |= {"experts_ptr": "*i64"} if block is None else {"experts_ptr": "*i32", "members_ptr": "*i32"}
            constants = common | {"ACTIVATION": "silu" if is_gated else None, "IS_GATED": is_gated, **tiles.constants()}
            constants |= {"members_ptr": None} if block is None else {}
            constants |= {name: None for name, kind in parts.items() if kind is None}
            types |= {name: kind for name, kind in parts.items() if kind is not None}
            reason = "one choice" if block is None else f"{block} tokens of an expert"
            yield Variant(multiply_experts, types, constants, tiles.num_warps, tiles.num_stages, reason)
    for dtype in ("*bf16", "*fp16"):
        types = {"parts_ptr": dtype, "ids_ptr": "*i64", "weights_ptr": "*fp32", "out_ptr": dtype}
        types |= dict.fromkeys(("size", "stride", "top_k"), "i32")
        constants = {"IS_WEIGHTED": True, "IS_EVEN": True, "COLUMNS": _COLUMNS}
        yield Variant(sum_experts, types, constants, 4, 3, "16 bytes a thread")


def covers(x: Tensor, packed: GroupedExperts) -> bool:
    """Returns True if the kernels multiply `x` by these experts."""
    layers = [layer.weight for layer in (packed.gate_up, packed.up, packed.down) if layer is not None]
    return x.dtype in _DTYPES and all(isinstance(each, QuantizedWeight) or each.dtype == x.dtype for each in layers)


def run(
    packed: GroupedExperts,
    call: ExpertCall,
    activate: Callable[[Tensor], Tensor],
    add_low_rank: Callable[[Tensor, Tensor, LowRankWeights, Tensor], Tensor],
) -> Tensor:
    """Runs `Backend.experts`; `activate` is for gates and ups of two products, and for those that adapters change."""
    num_tokens, top_k = call.ids.shape
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if call.ids.numel() == 0:
        return out.zero_()
    x = call.x if call.x.stride(1) == 1 else call.x.contiguous()
    ids, weights = call.ids.contiguous(), call.weights.contiguous()
    blocks = _choose_blocks(ids, packed.num_experts)
    factors = weights if call.weighs_inputs else None
    multiply = partial(_multiply, x, blocks, ids.numel(), top_k=top_k, factors=factors)
    added = None if call.low_rank is None else AdaptedChoices.of(call, packed.num_experts, add_low_rank)
    if packed.up is None and added is None:
        inner = multiply(packed.gate_up, packed.is_gated, call.activation)
    else:
        layers = (packed.gate_up, packed.up)
        inner = torch.cat([multiply(layer, False, None) for layer in layers if layer is not None], dim=1)
        if added is not None and call.low_rank is not None:
            inner = added.added(added.inputs, inner, call.low_rank.gate_up)
        inner = activate(inner)
    outputs = _multiply(inner, blocks, ids.numel(), packed.down, False, None)
    if added is not None and call.low_rank is not None:
        outputs = added.added(inner, outputs, call.low_rank.down)
    grid = num_tokens, triton.cdiv(packed.hidden_size, _COLUMNS)
    sum_experts(
        grid, outputs, ids, weights, out, packed.hidden_size, outputs.stride(0), top_k,
        IS_WEIGHTED=not call.weighs_inputs, IS_EVEN=packed.hidden_size % 8 == 0, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out


def _choose_blocks(ids: Tensor, num_experts: int) -> Blocks:
    """Sorts choices where some may share an expert; of so few that hardly any do, each is a block."""
    size = choose_block(ids.numel(), num_experts)
    if len(ids) == 1 or 2 * ids.numel() <= num_experts:
        return Blocks(ids.flatten(), None, size)
    return sort_by_expert(ids, num_experts, size)


def _multiply(
    x: Tensor,
    blocks: Blocks,
    num_choices: int,
    layer: GroupedLinear,
    is_gated: bool,
    activation: Activation | None,
    *,
    top_k: int = 1,
    factors: Tensor | None = None,
) -> Tensor:
    """Runs one linear layer of each choice's expert: [num_choices, outputs], of undefined values for the id -1."""
    weight = layer.weight
    codes = weight if isinstance(weight, QuantizedWeight) else None
    elements = weight.codes if isinstance(weight, QuantizedWeight) else weight
    num_rows, row_stride = elements.shape[1:]
    in_features = row_stride if codes is None or codes.table is None else 2 * row_stride
    in_features = min(in_features, x.shape[1])  # plain weights are padded
    size = num_rows // 2 if is_gated else num_rows
    tiles = choose_tiles(blocks.size, is_quantized=codes is not None)
    num_groups = 1 if codes is None else codes.scales.shape[2]
    out = torch.empty(num_choices, size, dtype=x.dtype, device=x.device)
    multiply_experts(
        (triton.cdiv(num_rows, tiles.BLOCK_ROWS), len(blocks.experts)), x, elements,
        *((None,) * 4 if codes is None else (codes.table, codes.scales, codes.offsets, codes.input_order)),
        layer.bias, factors, blocks.experts, blocks.members, out, size, num_rows, size, layer.shape[0],
        layer.shape[0] // 2, in_features, row_stride, num_groups, x.stride(0), size, top_k,
        ACTIVATION=activation, IS_GATED=is_gated, SPAN=_span(in_features // num_groups, num_groups, tiles.BLOCK_IN),
        IS_EVEN=in_features % tiles.BLOCK_IN == 0 and row_stride % 32 == 0 and x.stride(0) % 8 == 0,
        **tiles._asdict(),
    )  # fmt: skip
    return out


def _span(group_size: int, num_groups: int, block: int) -> int:
    """The inputs of a block that share a scale, as in `scale_weights`."""
    if num_groups == 1 or group_size % block == 0:
        return block
    return group_size if block % group_size == 0 else 0

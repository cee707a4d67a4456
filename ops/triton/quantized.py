"""Linear layers with quantized weights, by kernels that read their codes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.eager.quantized import DequantizedLinear, QuantizedLayer
from quire.ops.quantized import QuantizedWeight
from quire.ops.triton.arch import arch_of
from quire.ops.triton.codes import dequantize_codes, multiply_few_codes
from quire.ops.triton.linear import (
    BLOCK_IN,
    FUSED,
    MAX_TOKENS,
    PlainWeight,
    Tiles,
    TritonLinear,
    aligned,
    choose_split,
)
from quire.ops.triton.specialization import POINTER_TYPES
from quire.ops.triton.variants import Variant

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUPS = (16, 32, 64)
_PART = 1 << 26
"""The numbers of a weight that are dequantized at once, for products of many tokens."""
_FORMS = (
    *((kind, BLOCK_IN, "*fp32", False) for kind in ("int8", "float8_e4m3fn", "line", "float4_e2m1")),
    *(("line", group, "*fp16", has_offsets) for group in (64, 32) for has_offsets in (False, True)),
    ("line", BLOCK_IN, "*fp32", True),
    ("int8", 32, "*fp16", False),
    ("float4_e2m1", 32, "*fp32", False),
    ("float4_e2m1", 16, "*fp32", False),
    ("table", 64, "*fp32", False),
)
"""The kind, group, type of scales, and offsets, of common formats."""
_PROGRAMS = 256
_STAGES = ((16, 4, 6), (32, 4, 5), (64, 4, 4), (128, 8, 3))
"""Tokens of a block, warps, and stages. With 128 tokens, four warps would lack registers for the sums and the codes."""
_DEQUANTIZED_ROWS = 32
_MULTIPLIED = (torch.bfloat16, torch.float16)


class Codes(NamedTuple):
    """How kernels make numbers of a weight's codes.

    Attributes:
        kind: a dtype's name; or of 4-bit codes, `line`, `float4_e2m1`, or `table`, which is read for each code.
        group: the inputs of a block that share a scale.
        flip: the bits of codes of a `line` that are inverted.
        base: subtracted from 2²³ + a code.
    """

    kind: str
    group: int
    flip: int = 0
    base: float = 0.0


@dataclass(frozen=True)
class CodedLayer(QuantizedLayer):
    """A quantized weight that kernels multiply, unchanged."""

    codes: Codes


def codes_of(weight: QuantizedWeight) -> Codes | None:
    """Looks at a weight, its table included, and returns how kernels read it; None: they do not."""
    in_features, group = weight.shape[1], weight.group_size
    if group in (in_features, *_GROUPS) or group % BLOCK_IN == 0:
        group = group if group in _GROUPS else BLOCK_IN
    else:
        return None
    if in_features % 32 or weight.codes.data_ptr() % 16 or not weight.codes.is_contiguous():
        return None
    if weight.table is None:
        return Codes(str(weight.codes.dtype).removeprefix("torch."), group)
    return Codes("table", group) if weight.table.is_meta else _codes_of_table(weight.table.tolist(), group)


def _codes_of_table(table: list[float], group: int) -> Codes:
    for flip in (0, 8):
        first = table[flip]
        if first == int(first) and all(table[code ^ flip] == first + code for code in range(16)):
            return Codes("line", group, flip, 2.0**23 - first)
    if table == [*_E2M1, *(-each for each in _E2M1)]:
        return Codes("float4_e2m1", group)
    return Codes("table", group)


def choose_code_tiles(num_tokens: int, shared_bytes: int) -> Tiles:
    """As `choose_tiles`: 64 rows, and about as much of the weight in flight, for codes of a byte."""
    block_tokens, num_warps, num_stages = next(each for each in _STAGES if num_tokens <= each[0])
    stage_bytes = 2 * block_tokens * BLOCK_IN + 64 * BLOCK_IN
    return Tiles(block_tokens, 64, num_warps, min(num_stages, shared_bytes // stage_bytes))


def variants() -> Iterator[Variant]:
    """The forms for the layers that checkpoints have; the first layer of another form waits for its compilation."""
    scalars = ("out_features", "in_features", "num_groups", "group_size", "flip")
    places = ("num_tokens", "x_stride", "out_stride", "split", "num_biases")
    for dtype, (kind, group, scales, has_offsets) in product(_MULTIPLIED, _FORMS):
        types = dict.fromkeys(scalars, "i32") | {"codes_ptr": "*u8", "base": "fp32", "scales_ptr": scales}
        if has_offsets:
            types["offsets_ptr"] = scales
        if kind == "table":
            types["table_ptr"] = "*fp32"
        missing: dict[str, object] = dict.fromkeys({"offsets_ptr", "table_ptr"} - types.keys())
        missing |= {"KIND": kind, "GROUP": group, "BLOCK_IN": BLOCK_IN}
        number = POINTER_TYPES[dtype]
        rows: dict[str, object] = {"BLOCK_ROWS": _DEQUANTIZED_ROWS}
        yield Variant(dequantize_codes, types | {"out_ptr": number}, missing | rows, 4, 1, "reads and writes once")
        types |= dict.fromkeys(places, "i32") | dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), number)
        for activation, (num_tokens, *_) in product((None, *FUSED), _STAGES):
            tiles = choose_code_tiles(num_tokens, arch_of("sm_90").max_shared_bytes)
            constants = missing | {"ACTIVATION": activation, **tiles.constants()}
            shape = (tiles.num_warps, tiles.num_stages, "64 rows for wgmma, whose codes are widened in registers")
            parts = {"partials_ptr": "*fp32", "counters_ptr": "*i32"}
            yield Variant(multiply_few_codes, types | parts, constants, *shape)
            yield Variant(multiply_few_codes, types, constants | dict.fromkeys(parts), *shape)


class TritonQuantized(DequantizedLinear[PlainWeight]):
    """Products with quantized weights: of few tokens by codes, of many by dequantized values.

    What no kernel takes is multiplied as by `DequantizedLinear`.
    """

    packed_types = (CodedLayer, Codes)

    def __init__(self, plain: TritonLinear) -> None:
        super().__init__(plain)
        self._plain = plain

    def pack(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLayer:
        codes = codes_of(weight)
        if codes is None:
            return QuantizedLayer(weight, bias)
        scales, offsets = _packed_scales(weight.scales, codes), weight.offsets
        offsets = None if offsets is None else _packed_scales(offsets, codes)
        return CodedLayer(weight._replace(scales=scales, offsets=offsets), bias, codes)

    def multiply(self, x: Tensor, layer: QuantizedLayer) -> Tensor:
        if not isinstance(layer, CodedLayer) or x.dtype not in _MULTIPLIED or len(x) == 0:
            return super().multiply(x, layer)
        x = _ordered(x, layer.weight)
        if len(x) > MAX_TOKENS and not self._plain.is_invariant:
            return _many(x, layer)
        return self._in_blocks(x, layer, None)

    def multiply_gated(self, x: Tensor, layer: QuantizedLayer, activation: Activation) -> Tensor | None:
        """Runs `Backend.gated_linear`, or returns None if no kernel does."""
        if not isinstance(layer, CodedLayer) or x.dtype not in _MULTIPLIED or activation not in FUSED:
            return None
        if not len(x) or (len(x) > MAX_TOKENS and not self._plain.is_invariant):
            return None
        return self._in_blocks(_ordered(x, layer.weight), layer, activation)

    def _in_blocks(self, x: Tensor, layer: CodedLayer, activation: Activation | None) -> Tensor:
        """Multiplies as many tokens at a time as the kernel takes."""
        blocks = [self._few(block, layer, activation) for block in x.split(MAX_TOKENS)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _few(self, x: Tensor, layer: CodedLayer, activation: Activation | None) -> Tensor:
        weight, bias = layer.weight, layer.bias
        out_features, in_features = weight.shape
        x = aligned(x)
        tiles = choose_code_tiles(len(x), self._plain.shared_bytes(x.device))
        split = choose_split(out_features, in_features, _PROGRAMS)
        places = self._plain.places(x, tiles.BLOCK_ROWS, out_features, split, activation)
        multiply_few_codes(
            places.grid,
            x, *_tensors(weight, layer.codes), x if bias is None else bias,
            places.out, places.partials, places.counters,
            len(x), out_features, in_features, weight.scales.shape[1], weight.group_size,
            x.stride(0), places.out.stride(0), split, 0 if bias is None else out_features,
            layer.codes.flip, layer.codes.base,
            ACTIVATION=activation, KIND=layer.codes.kind, GROUP=layer.codes.group, BLOCK_IN=BLOCK_IN, **tiles._asdict(),
        )  # fmt: skip
        return places.result()


def _packed_scales(scales: Tensor, codes: Codes) -> Tensor:
    """Scales as the kernels read them: dense, and in float32 where they are few, so that there are few variants."""
    return (scales.float() if codes.group == BLOCK_IN else scales).contiguous()


def _ordered(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return x if weight.input_order is None else x.index_select(1, weight.input_order)


def _tensors(weight: QuantizedWeight, codes: Codes) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The arguments of `numbers_of`."""
    table = weight.table if codes.kind == "table" else None
    return weight.codes.view(torch.uint8), table, weight.scales, weight.offsets


def _many(x: Tensor, layer: CodedLayer) -> Tensor:
    out_features, in_features = layer.weight.shape
    size = max(1, _PART // in_features // 16) * 16  # so that parts are aligned
    parts = []
    for first in range(0, out_features, size):
        rows = slice(first, first + size)
        bias = None if layer.bias is None else layer.bias[rows]
        parts.append(F.linear(x, dequantized(layer.weight.rows(rows), layer.codes, x.dtype), bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def dequantized(weight: QuantizedWeight, codes: Codes, dtype: torch.dtype) -> Tensor:
    """As `quire.ops.quantized.dequantize`, but in the order of the codes."""
    out_features, in_features = weight.shape
    out = weight.codes.new_empty(out_features, in_features, dtype=dtype)
    dequantize_codes(
        (triton.cdiv(out_features, _DEQUANTIZED_ROWS), triton.cdiv(in_features, BLOCK_IN)),
        *_tensors(weight, codes), out,
        out_features, in_features, weight.scales.shape[1], weight.group_size, codes.flip, codes.base,
        KIND=codes.kind, GROUP=codes.group, BLOCK_ROWS=_DEQUANTIZED_ROWS, BLOCK_IN=BLOCK_IN, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out

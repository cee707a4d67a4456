"""Layers as torchao's classes of tensors lie in safetensors; see `stored_formats`."""

from typing import Any

import torch
from torch import Tensor

from tests.executor.weights.stored_formats import (
    FP4,
    Format,
    Writer,
    draw,
    draw_scales,
    float8,
    pairs,
    scaled_inputs,
    widened,
)


def whole_codes(bits: int, group: int | None, *, zeros: bool = False) -> Writer:
    """IntxUnpackedToInt8Tensor, or Int8Tensor, which has the same tensors."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        half = 1 << (bits - 1)
        codes = draw(generator, -half, half, out, size)
        num_groups = 1 if group is None else -(-size // group)
        scales = draw_scales(generator, half, out, num_groups)
        middle = draw(generator, -half, half, out, num_groups) if zeros else torch.zeros(out, num_groups)
        tensors = {
            "_weight_qdata": codes.to(torch.int8), "_weight_scale": scales.bfloat16(),
            "_weight_zero_point": middle.to(torch.int8),
        }  # fmt: skip
        return tensors, (codes - widened(middle, size, group)) * widened(scales, size, group)

    return write


def float8_tensor(block: tuple[int, int] | None) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, (rows, columns) = float8(generator, out, size), block or (1, size)
        scales = draw_scales(generator, 127, out // rows, size // columns)
        return {"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * widened(
            scales.repeat_interleave(rows, 0), size
        )

    return write


def int4(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Int4Tensor; zero points are numbers, and not codes."""
    codes, scales = draw(generator, -8, 8, out, size), draw_scales(generator, 8, -(-size // 32), out)
    zeros = draw_scales(generator, 4, -(-size // 32), out)
    tensors = {
        "_weight_qdata": pairs(codes & 15).view(torch.int8), "_weight_scale": scales, "_weight_zero_point": zeros,
    }  # fmt: skip
    return tensors, codes * widened(scales.t(), size, 32) + widened(zeros.t(), size, 32)


def int4_in_tiles(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Int4TilePackedTo4dTensor, word by word as torch's CUDA kernel for `_convert_weight_to_int4pack` fills them."""
    outs, ins = -(-out // 8) * 8, -(-size // 1024) * 1024
    codes, scales = draw(generator, 0, 16, outs, ins), draw_scales(generator, 8, ins // 32, outs)
    zeros = draw_scales(generator, 4, ins // 32, outs)
    words = torch.zeros(outs // 8, ins // 128, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for word in range(4):
            for place, step in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                first = 32 * word + 2 * (lane % 4) + step
                words[:, :, lane, word] |= codes[lane // 4 :: 8, first::128] << (4 * place)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    tensors = {"_weight_qdata": signed, "_weight_scale_and_zero": torch.stack((scales, zeros), dim=-1).bfloat16()}
    numbers = (codes - 8) * widened(scales.t(), ins) + widened(zeros.t(), ins)
    return tensors, numbers[:out, :size]


def swizzled(scales: Tensor) -> Tensor:
    """As cuBLAS reads scales: https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout."""
    out, groups = scales.shape
    stored = torch.zeros(-(-out // 128), -(-groups // 4), 512, dtype=scales.dtype)
    for row in range(out):
        for group in range(groups):
            place = (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
            stored[row // 128, group // 4, place] = scales[row, group]
    return stored.view(32 * stored.shape[0], 16 * stored.shape[1])


def mx(kind: str) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        exponents = draw(generator, 116, 120, out, size // 32).to(torch.uint8)
        wide = widened(torch.pow(2.0, exponents.float() - 127), size)
        stored = swizzled(exponents).view(torch.float8_e8m0fnu)
        if kind == "fp8":
            codes = float8(generator, out, size)
            return {"_weight_qdata": codes, "_weight_scale": stored}, codes.float() * wide
        short = draw(generator, 0, 16, out, size)
        return {"_weight_qdata": pairs(short), "_weight_scale": stored}, FP4[short] * wide

    return write


def nvfp4(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, factor = draw(generator, 0, 16, out, size), torch.tensor(1 / 3000)
    scales = (torch.rand(out, size // 16, generator=generator) * 300 + 20).to(torch.float8_e4m3fn)
    stored = swizzled(scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    tensors = {"_weight_qdata": pairs(codes), "_weight_scale": stored, "_weight_per_tensor_scale": factor}
    return tensors, FP4[codes] * widened(scales.float(), size) * factor


def _config(name: str, **fields: Any) -> dict[str, Any]:
    given = {"default": {"_type": f"{name}Config", "_version": 2, "_data": fields}}
    return {"quant_method": "torchao", "quant_type": given, "modules_to_not_convert": None}


def _intx(bits: int, group: int, mapping: str) -> dict[str, Any]:
    return _config(
        "IntxWeightOnly",
        weight_dtype={"_type": "torch.dtype", "_data": f"int{bits}"},
        granularity={"_type": "PerGroup", "_data": {"group_size": group}},
        mapping_type={"_type": "MappingType", "_data": mapping},
    )


def _blocks(out: int, size: int) -> dict[str, Any]:
    return {"_type": "PerBlock", "_version": 1, "_data": {"block_size": [out, size]}}


_ROWS = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}

FORMATS: dict[str, Format] = {
    "torchao-int8": Format(_config("Int8WeightOnly", group_size=None, granularity=_ROWS), whole_codes(8, None)),
    "torchao-int4-in-bytes": Format(_intx(4, 32, "SYMMETRIC"), whole_codes(4, 32)),
    "torchao-int3-zeros": Format(_intx(3, 16, "ASYMMETRIC"), whole_codes(3, 16, zeros=True)),
    "torchao-int6-zeros": Format(_intx(6, 32, "ASYMMETRIC"), whole_codes(6, 32, zeros=True)),
    "torchao-fp8": Format(_config("Float8WeightOnly", granularity=_ROWS), float8_tensor(None)),
    "torchao-fp8-block": Format(
        _config("Float8DynamicActivationFloat8Weight", granularity=[_blocks(1, 32), _blocks(8, 32)]),
        float8_tensor((8, 32)),
    ),
    "torchao-int4": Format(_config("Int4WeightOnly", group_size=32, int4_packing_format="plain"), int4),
    "torchao-int4-scaled-inputs": Format(
        _config("Int4WeightOnly", group_size=32, int4_packing_format="plain"),
        scaled_inputs(int4, "_weight_act_pre_scale"),
    ),
    "torchao-int8-scaled-inputs": Format(
        _config("Int8DynamicActivationInt8Weight", granularity=_ROWS),
        scaled_inputs(whole_codes(8, None), "_weight_act_pre_scale"),
    ),
    "torchao-int4-tiles": Format(
        _config("Int4WeightOnly", group_size=32, int4_packing_format="tile_packed_to_4d"), int4_in_tiles
    ),
    "torchao-mxfp4": Format(
        _config("MXDynamicActivationMXWeight", weight_dtype={"_data": "float4_e2m1fn_x2"}), mx("fp4")
    ),
    "torchao-mxfp8": Format(_config("MXDynamicActivationMXWeight", weight_dtype={"_data": "float8_e4m3fn"}), mx("fp8")),
    "torchao-nvfp4": Format(_config("NVFP4WeightOnly"), nvfp4),
}

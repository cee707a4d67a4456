"""Layers as NVIDIA's Model Optimizer stores them; see `stored_formats`."""

import torch
from torch import Tensor

from tests.executor.weights.stored_formats import (
    Format,
    Writer,
    by_tensor,
    draw,
    draw_scales,
    float8_with_exponents,
    mixed,
    mxfp4,
    nvfp4,
    scaled_inputs,
    whole_bytes,
)


def modelopt_w4a8(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    tensors, numbers = modelopt_int4(out, size, generator)
    return tensors | {"weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(0.1)}, numbers


def modelopt_int4(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = draw(generator, -8, 8, out, size), draw_scales(generator, 8, out, -(-size // 32))
    even, odd = (codes & 15).to(torch.uint8).unflatten(0, (-1, 2)).unbind(1)
    tensors = {"weight": even | (odd << 4), "weight_scale": scales}
    return tensors, codes * scales[:, torch.arange(size) // 32]


def modelopt_blocks(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """FP8_PB_WO: blocks of 128 x 128, whose scales have four dimensions."""
    tensors, numbers = whole_bytes("float8", block=(128, 128))(out, size, generator)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None]}, numbers


def low_rank(write: Writer, kind: str) -> Writer:
    """The same and a product of two thin matrices in some layers, before their inputs' factors."""

    def write_both(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, numbers = write(out, size, generator)
        if out > size:
            return tensors, numbers
        inner, outer = (torch.randn(*shape, generator=generator) / 16 for shape in ((3, size), (out, 3)))
        return {**tensors, f"{kind}_a": inner, f"{kind}_b": outer}, numbers + outer @ inner

    return write_both


_MODELOPT_MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}

FORMATS: dict[str, Format] = {
    "modelopt-fp8": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, whole_bytes("float8", shape=by_tensor)),
    "modelopt-fp8-block": Format({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, modelopt_blocks),
    "modelopt-mxfp8": Format(
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        float8_with_exponents("weight_scale", (1, 32), torch.uint8),
    ),
    "modelopt-mixed": Format(
        _MODELOPT_MIXED,
        mixed(nvfp4("weight", "weight_scale_2", divides=False), whole_bytes("float8", shape=by_tensor)),
    ),
    "modelopt-mixed-blocks": Format(
        _MODELOPT_MIXED, mixed(float8_with_exponents("weight_scale", (1, 32), torch.uint8), modelopt_blocks)
    ),
    "modelopt-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4("weight", "weight_scale_2", divides=False)
    ),
    "modelopt-nvfp4-awq": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        scaled_inputs(nvfp4("weight", "weight_scale_2", divides=False)),
    ),
    "modelopt-int4-awq": Format(
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}, scaled_inputs(modelopt_int4)
    ),
    "modelopt-w4a8-awq": Format(
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 32}, scaled_inputs(modelopt_w4a8)
    ),
    "modelopt-mixed-w4a8": Format(
        _MODELOPT_MIXED | {"quantized_layers": {"down_proj": {"quant_algo": "W4A8_AWQ", "group_size": 32}}},
        mixed(nvfp4("weight", "weight_scale_2", divides=False), modelopt_w4a8),
    ),
    "modelopt-mixed-svd": Format(
        _MODELOPT_MIXED,
        scaled_inputs(low_rank(mixed(mxfp4("weight"), whole_bytes("float8", shape=by_tensor)), "svdquant_lora")),
    ),
    "modelopt-nvfp4-svd": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"},
        scaled_inputs(low_rank(nvfp4("weight", "weight_scale_2", divides=False), "svdquant_lora")),
    ),
    "modelopt-nvfp4-svd-of-quantizers": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"},
        low_rank(nvfp4("weight", "weight_scale_2", divides=False), "weight_quantizer._svdquant_lora"),
    ),
    "modelopt-w4a8-nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"},
        nvfp4("weight", "weight_scale_2", divides=False, group=32),
    ),
    "modelopt-w4a8-mxfp4": Format({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, mxfp4("weight")),
    "modelopt-w8a16": Format(
        {"quant_method": "modelopt", "quant_algo": "W8A16"}, whole_bytes("int8", shape=lambda out, size: (out,))
    ),
    "modelopt-w8a8-smooth": Format(
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
        scaled_inputs(whole_bytes("int8", shape=lambda out, size: (out,))),
    ),
    "modelopt-fp8-channel": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        whole_bytes("float8", shape=lambda out, size: (out,)),
    ),
}  # fmt: skip

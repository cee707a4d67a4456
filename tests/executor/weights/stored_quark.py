"""Layers as AMD's Quark stores them; see `stored_formats`."""

from typing import Any

import torch
from torch import Tensor

from tests.executor.weights.stored_formats import (
    AWQ_ORDER,
    Format,
    Writer,
    by_tensor,
    draw,
    draw_scales,
    mixed,
    mxfp4,
    mxfp6,
    nvfp4,
    outputs_in_words,
    whole_bytes,
)


def quark_int4(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = draw(generator, -8, 8, size, out), draw_scales(generator, 8, -(-size // 32), out)
    tensors = {"weight": outputs_in_words(codes & 15, AWQ_ORDER), "weight_scale": scales}
    return tensors, (codes * scales[torch.arange(size) // 32]).t()


def quark_int4_with_zeros(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    tensors, numbers = quark_int4(out, size, generator)
    zeros = draw(generator, -8, 8, len(tensors["weight_scale"]), out)
    shift = (zeros * tensors["weight_scale"])[torch.arange(size) // 32].t()
    return tensors | {"weight_zero_point": outputs_in_words(zeros & 15, AWQ_ORDER)}, numbers - shift


def quark_int4_of_fp8(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Words of inputs; numbers that were rounded to float8 and then to int4."""
    codes, scales = draw(generator, -8, 8, out, size), draw_scales(generator, 8, out)
    scale = torch.tensor(0.75)
    tensors = {"weight": outputs_in_words(codes & 15, AWQ_ORDER), "weight_scale": scale, "weight_scale_2": scales}
    return tensors, codes * scales.unsqueeze(1) * scale


def quark_rows(*, zeros: bool, signed: bool) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        low = -8 if signed else 0
        codes, scales = draw(generator, low, low + 16, out, size), draw_scales(generator, 8, out)
        middle = draw(generator, low, low + 16, out) if zeros else torch.full((out,), low + 8)
        tensors = {"weight": outputs_in_words(codes & 15, AWQ_ORDER), "weight_scale": scales}
        if zeros:
            padded = torch.nn.functional.pad(middle & 15, (0, -out % 8)).unsqueeze(0)
            tensors["weight_zero_point"] = outputs_in_words(padded, AWQ_ORDER)[0]
        return tensors, (codes - middle.unsqueeze(1)) * scales.unsqueeze(1)

    return write


_QUARK = {"quant_method": "quark", "exclude": ["lm_head"]}


def _quark(dtype: str, **more: Any) -> dict[str, Any]:
    return _QUARK | {"global_quant_config": {"weight": {"dtype": dtype, **more}}, "export": {"pack_method": "reorder"}}


FORMATS: dict[str, Format] = {
    "quark-int8": Format(_quark("int8"), whole_bytes("int8", shape=lambda out, size: (out,))),
    "quark-fp8": Format(_quark("fp8_e4m3"), whole_bytes("float8", shape=by_tensor)),
    "quark-nvfp4": Format(
        _QUARK | {"global_quant_config": {"weight": [{"dtype": "fp4", "group_size": 16}, {"dtype": "fp8_e4m3"}]}},
        nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "quark-fp8-block": Format(
        _quark("fp8_e4m3", qscheme="per_block", block_size=[24, 40]), whole_bytes("float8", block=(24, 40))
    ),
    "quark-mxfp4": Format(_quark("fp4", group_size=32), mxfp4("weight")),
    "quark-mxfp6": Format(_quark("fp6_e3m2", group_size=32), mxfp6(3)),
    "quark-mxfp6-beside-others": Format(
        _quark("fp4", group_size=32) | {"layer_quant_config": {"*": {"weight": [{"dtype": "fp6_e2m3"}]}}}, mxfp6(2)
    ),
    "quark-mixed": Format(
        _quark("fp4", group_size=32)
        | {"layer_quant_config": {f"*{name}_proj": {"weight": {"dtype": "fp8_e4m3"}} for name in ("o", "down")}},
        mixed(mxfp4("weight"), whole_bytes("float8", shape=by_tensor)),
    ),
    "quark-int4": Format(_quark("int4", group_size=32), quark_int4),
    "quark-int4-zeros": Format(_quark("int4", group_size=32, symmetric=False), quark_int4_with_zeros),
    "quark-int4-channel": Format(
        _quark("int4", qscheme="per_channel", symmetric=True), quark_rows(zeros=False, signed=True)
    ),
    "quark-int4-channel-zeros": Format(
        _quark("int4", qscheme="per_channel", symmetric=False), quark_rows(zeros=True, signed=True)
    ),
    "quark-uint4-channel": Format(
        _quark("uint4", qscheme="per_channel", symmetric=False), quark_rows(zeros=True, signed=False)
    ),
    "quark-int4-of-fp8": Format(
        _QUARK | {"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
        quark_int4_of_fp8,
    ),
    "quark-int4-beside-fp8": Format(
        _quark("fp8_e4m3") | {"layer_quant_config": {"*": {"weight": {"dtype": "int4", "group_size": 32}}}}, quark_int4
    ),
}  # fmt: skip

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


def zeros_of_zero(write: Writer) -> Writer:
    """The same with zero points that are zero, as Quark writes them beside symmetric integers."""

    def write_with_zeros(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, numbers = write(out, size, generator)
        scales, codes = tensors["weight_scale"], tensors["weight"]
        dtype, per = (codes.dtype, 1) if codes.dtype == torch.int8 else (torch.int32, 8)
        shape = (*scales.shape[:-1], -(-scales.shape[-1] // per))
        return tensors | {"weight_zero_point": torch.zeros(shape, dtype=dtype)}, numbers

    return write_with_zeros


def quark_columns(dtype: torch.dtype, *, zeros: bool = False) -> Writer:
    """int8, uint8 or int2 of groups: a code a number, in columns."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        low, high = {torch.int8: (-128, 128), torch.uint8: (0, 256), torch.int32: (-2, 2)}[dtype]
        num_groups, groups = -(-size // 32), torch.arange(size) // 32
        codes, scales = draw(generator, low, high, size, out), draw_scales(generator, high, num_groups, out)
        middle = draw(generator, low, high, num_groups, out) if zeros else torch.zeros(num_groups, out, dtype=torch.int)
        tensors = {"weight": codes.to(dtype), "weight_scale": scales, "weight_zero_point": middle.to(dtype)}
        return tensors, ((codes - middle[groups]) * scales[groups]).t()

    return write


def quark_threes(group: int | None, *, zeros: bool = False) -> Writer:
    """int3: eight codes in three bytes, of the zero points also of groups in rows of outputs."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_groups = 1 if group is None else size // group
        groups = torch.arange(size) // (group or size)
        codes, scales = draw(generator, -4, 4, out, size), draw_scales(generator, 4, out, num_groups)
        middle = draw(generator, -4, 4, out, num_groups) if zeros else torch.zeros(out, num_groups, dtype=torch.long)
        tensors = {"weight": threes(codes), "weight_scale": scales.t().contiguous() if group else scales.flatten()}
        tensors["weight_zero_point"] = threes(middle) if group else threes(middle.t())[0]
        return tensors, (codes - middle[:, groups]) * scales[:, groups]

    return write


def threes(codes: Tensor) -> Tensor:
    """Rows of codes of three bits in two's complement as bytes, filled from the lowest bit on."""
    bits = (codes.unsqueeze(-1) >> torch.arange(3)) & 1
    octets = bits.flatten(1).unflatten(1, (-1, 8))
    return (octets << torch.arange(8)).sum(dim=-1).to(torch.uint8)


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
    "quark-int4-zeros-of-zero": Format(_quark("int4", group_size=32), zeros_of_zero(quark_int4)),
    "quark-int4-channel-zeros-of-zero": Format(
        _quark("int4", qscheme="per_channel", symmetric=True), zeros_of_zero(quark_rows(zeros=False, signed=True))
    ),
    "quark-int8-zeros-of-zero": Format(
        _quark("int8"), zeros_of_zero(whole_bytes("int8", shape=lambda out, size: (out,)))
    ),
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
    "quark-uint4-by-type": Format(
        _quark("fp8_e4m3")
        | {
            "layer_type_quant_config": {
                "Linear": {"weight": {"dtype": "uint4", "qscheme": "per_channel", "symmetric": False}}
            }
        },
        quark_rows(zeros=True, signed=False),
    ),
    "quark-int8-groups": Format(_quark("int8", qscheme="per_group", group_size=32), quark_columns(torch.int8)),
    "quark-int8-groups-zeros": Format(
        _quark("int8", qscheme="per_group", group_size=32, symmetric=False), quark_columns(torch.int8, zeros=True)
    ),
    "quark-uint8-groups": Format(
        _quark("uint8", qscheme="per_group", group_size=32, symmetric=False), quark_columns(torch.uint8, zeros=True)
    ),
    "quark-int2": Format(_quark("int2", qscheme="per_group", group_size=32), quark_columns(torch.int32)),
    "quark-int2-zeros": Format(
        _quark("int2", qscheme="per_group", group_size=32, symmetric=False), quark_columns(torch.int32, zeros=True)
    ),
    "quark-int2-beside-int4": Format(
        _quark("int4", group_size=32)
        | {"layer_quant_config": {"*o_proj": {"weight": {"dtype": "int2", "qscheme": "per_group", "group_size": 32}}}},
        mixed(quark_int4, quark_columns(torch.int32)),
    ),
    "quark-int3": Format(_quark("int3", qscheme="per_channel"), quark_threes(None)),
    "quark-int3-zeros": Format(
        _quark("int3", qscheme="per_channel", symmetric=False), quark_threes(None, zeros=True)
    ),
    "quark-int3-groups": Format(
        _quark("int3", qscheme="per_group", group_size=4, symmetric=False), quark_threes(4, zeros=True)
    ),
    "quark-int4-of-fp8": Format(
        _QUARK | {"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}},
        quark_int4_of_fp8,
    ),
    "quark-int4-beside-fp8": Format(
        _quark("fp8_e4m3") | {"layer_quant_config": {"*": {"weight": {"dtype": "int4", "group_size": 32}}}}, quark_int4
    ),
}  # fmt: skip

"""Layers in the formats of quantized checkpoints, written by the formats' own descriptions and not by their readers.

A writer draws codes and scales, and returns the layer's tensors by kind, and the numbers that they stand for.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Writer = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


class Format(NamedTuple):
    """A format: what config.json says, and how a layer is written."""

    config: dict[str, Any]
    write: Writer


def draw(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def draw_scales(generator: torch.Generator, magnitude: float, *shape: int) -> Tensor:
    """Scales that float16 and bfloat16 hold exactly, for codes up to `magnitude`."""
    return ((torch.rand(shape, generator=generator) + 0.5) * 0.3 / magnitude).to(torch.bfloat16).half().float()


def stream(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as int32 words, filled from the lowest bit on."""
    each = (codes.numpy()[..., None] >> np.arange(bits)) & 1
    rows = each.reshape(len(codes), -1).astype(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return torch.from_numpy(np.packbits(rows, axis=1, bitorder="little").view(np.int32).copy())


def pairs(codes: Tensor, *, first: int = 0) -> Tensor:
    """Two codes a byte; the first of them in the lower half (0) or the upper one (1)."""
    lower, upper = codes[..., first::2], codes[..., 1 - first :: 2]
    return (lower + 16 * upper).to(torch.uint8)


def in_any_order(size: int) -> Tensor:
    """The same for all layers, because those with the same inputs are quantized in the same order of them."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def widened(scales: Tensor, size: int, group: int | None = None) -> Tensor:
    """Scales [out, groups] as [out, in]; the last group may be shorter."""
    return scales.repeat_interleave(group or -(-size // scales.shape[1]), 1)[:, :size]


def float8(generator: torch.Generator, out: int, size: int) -> Tensor:
    return (torch.randn(out, size, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)


def packed_integers(
    bits: int, group: int | None, *, zeros: bool = False, order: bool = False, scale_dtype: torch.dtype = torch.float16
) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_groups = 1 if group is None else -(-size // group)
        codes = draw(generator, 0, 1 << bits, out, size)
        scales = draw_scales(generator, 1 << (bits - 1), out, num_groups)
        tensors = {
            "weight_packed": stream(codes, bits), "weight_scale": scales.to(scale_dtype),
            "weight_shape": torch.tensor([out, size]),
        }  # fmt: skip
        groups = torch.arange(size) // (group or size)
        if order:
            groups = groups[in_any_order(size)]
            tensors["weight_g_idx"] = groups.int()
        middle = torch.full((out, num_groups), 1 << (bits - 1))
        if zeros:
            middle = draw(generator, 0, 1 << bits, out, num_groups)
            tensors["weight_zero_point"] = stream(middle.t(), bits).t().contiguous()
        return tensors, (codes - middle[:, groups]) * scales[:, groups]

    return write


def gptq(bits: int, *, zeros: bool = False, order: bool = False, shift: int = 1, group: int = 32) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_groups = -(-size // group)
        codes = draw(generator, 0, 1 << bits, size, out)
        scales = draw_scales(generator, 1 << (bits - 1), num_groups, out)
        middle = draw(generator, 1, 1 << bits, num_groups, out) if zeros else torch.tensor(1 << (bits - 1))
        groups = torch.arange(size) // group
        if order:
            groups = groups[in_any_order(size)]
        tensors = {
            "qweight": stream(codes.t(), bits).t().contiguous(),
            "qzeros": stream((middle - shift).expand(num_groups, out), bits),
            "scales": scales.half(),
            "g_idx": groups.int(),
        }
        middle = middle.expand(num_groups, out)
        return tensors, ((codes - middle[groups]) * scales[groups]).t()

    return write


def gptq_mixed(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Bits that differ from layer to layer, also among those with the same inputs."""
    return gptq(8 if out == 32 else 4)(out, size, generator)


def outputs_in_words(codes: Tensor, order: Sequence[int]) -> Tensor:
    """Codes [rows, out] of four bits, eight outputs a word, in this order from the lowest bit on."""
    return stream(codes.unflatten(1, (-1, 8))[..., list(order)].flatten(1), 4)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    num_groups = -(-size // 32)
    codes, zeros = draw(generator, 0, 16, size, out), draw(generator, 0, 16, num_groups, out)
    scales = draw_scales(generator, 8, num_groups, out)
    tensors = {
        "qweight": outputs_in_words(codes, AWQ_ORDER), "qzeros": outputs_in_words(zeros, AWQ_ORDER),
        "scales": scales.half(),
    }  # fmt: skip
    groups = torch.arange(size) // 32
    return tensors, ((codes - zeros[groups]) * scales[groups]).t()


def awq_gemv(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of scales and zero points as long as AutoAWQ has them for groups of 32: a multiple of 32."""
    num_groups = -(-size // 32)
    codes, zeros = draw(generator, 0, 16, out, size), draw(generator, 0, 16, out, num_groups)
    scales = draw_scales(generator, 8, out, num_groups)
    more = (0, -num_groups % 32)
    tensors = {
        "qweight": stream(codes, 4), "qzeros": stream(torch.nn.functional.pad(zeros, more), 4),
        "scales": torch.nn.functional.pad(scales.half(), more),
    }  # fmt: skip
    groups = torch.arange(size) // 32
    return tensors, (codes - zeros[:, groups]) * scales[:, groups]


def awq_gemv_fast(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """As a loop over the places of codes: each four outputs have 64 inputs of the first, then of the second, ..."""
    num_groups = size // 32
    codes, zeros = draw(generator, 0, 16, out, size), draw(generator, 0, 16, num_groups, out)
    scales = draw_scales(generator, 8, num_groups, out)
    order = [32 * part + 8 * k + 2 * i + j for part in range(2) for i in range(4) for j in range(2) for k in range(4)]
    rows = [
        torch.cat([codes[first + row, start : start + 64][order] for start in range(0, size, 64) for row in range(4)])
        for first in range(0, out, 4)
    ]
    more = (0, 0, 0, -num_groups % 32)
    tensors = {
        "qweight": stream(torch.stack(rows), 4).view(torch.int16),
        "scales": torch.nn.functional.pad(scales.half(), more),
        "scaled_zeros": torch.nn.functional.pad(-(scales * zeros).half(), more),
    }  # fmt: skip
    groups = torch.arange(size) // 32
    return tensors, (codes * scales[groups].t()) - (scales * zeros).half().float()[groups].t()


def awq_gemv_fast_of_autoawq(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The same under the names of AutoAWQ's class."""
    tensors, numbers = awq_gemv_fast(out, size, generator)
    tensors["qzeros"] = tensors.pop("scaled_zeros")
    return tensors, numbers


def packed_integers_of_one_scale(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' pack-quantized with the strategy `tensor`."""
    codes, scale = draw(generator, 0, 16, out, size), draw_scales(generator, 8, 1)
    shape = torch.tensor([out, size])
    return {"weight_packed": stream(codes, 4), "weight_scale": scale, "weight_shape": shape}, (codes - 8) * scale


def awq_wide(bits: int) -> Writer:
    """Eight outputs in AWQ's order in a stream of bits, or, of 8 bits, four outputs a word in that of Marlin."""
    order = (0, 2, 1, 3) if bits == 8 else AWQ_ORDER

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_groups = -(-size // 32)
        codes, zeros = (draw(generator, 0, 1 << bits, rows, out) for rows in (size, num_groups))
        scales = draw_scales(generator, 1 << (bits - 1), num_groups, out)
        qweight, qzeros = (
            stream(each.unflatten(1, (-1, len(order)))[..., list(order)].flatten(1), bits) for each in (codes, zeros)
        )
        groups = torch.arange(size) // 32
        tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.half()}
        return tensors, ((codes - zeros[groups]) * scales[groups]).t()

    return write


def scaled_inputs(write: Writer, kind: str = "pre_quant_scale") -> Writer:
    """The same with factors of inputs in some layers: those that make as many numbers as models are wide."""

    def write_scaled(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, numbers = write(out, size, generator)
        if out > size:
            return tensors, numbers
        factors = torch.rand(size, generator=generator) + 0.5
        return {**tensors, kind: factors}, numbers * factors

    return write_scaled


def whole_bytes(kind: str, scale: str = "weight_scale", shape: Callable[[int, int], tuple[int, ...]] | None = None,
                block: tuple[int, int] | None = None) -> Writer:  # fmt: skip
    """One byte a number, with scales of `shape`, or for each block."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        is_int8 = kind == "int8"
        codes = draw(generator, -127, 128, out, size).to(torch.int8) if is_int8 else float8(generator, out, size)
        if block is not None:
            stored = draw_scales(generator, 127, -(-out // block[0]), -(-size // block[1]))
            scales = stored.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :size]
        else:
            assert shape is not None
            stored = draw_scales(generator, 127, *shape(out, size))
            scales = stored.reshape(-1, 1).expand(out, 1)
        return {"weight": codes, scale: stored}, codes.float() * scales

    return write


def int8_with_zeros(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    tensors, _ = whole_bytes("int8", shape=lambda out, size: (out, 1))(out, size, generator)
    zeros = draw(generator, -20, 20, out, 1)
    return tensors | {"weight_zero_point": zeros.to(torch.int8)}, (tensors["weight"] - zeros) * tensors["weight_scale"]


def float8_with_exponents(scale: str, block: tuple[int, int], dtype: torch.dtype) -> Writer:
    """Float8 whose scales are powers of two, stored as their exponents (E8M0)."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, shape = float8(generator, out, size), (-(-out // block[0]), -(-size // block[1]))
        exponents = draw(generator, 117, 121, *shape)
        scales = torch.pow(2.0, exponents - 127).repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)
        return {"weight": codes, scale: exponents.to(torch.uint8).view(dtype)}, codes.float() * scales[:, :size]

    return write


def mixed(narrow: Writer, wide: Writer) -> Writer:
    """Layers of up to 128 inputs in one way, those with more in another; layers with the same inputs are fused."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return (narrow if size <= 128 else wide)(out, size, generator)

    return write


def by_tensor(out: int, size: int) -> tuple[int, ...]:
    return ()


def by_output(out: int, size: int) -> tuple[int, ...]:
    return (out, 1)


MX_INT4 = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, -0.0, -0.25, -0.5, -0.75, -1, -1.25, -1.5, -1.75])


def mxfp4(weight: str, values: Tensor = FP4) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, exponents = draw(generator, 0, 16, out, size), draw(generator, 122, 126, out, size // 32)
        scales = torch.pow(2.0, exponents - 127)
        tensors = {weight: pairs(codes), "weight_scale": exponents.to(torch.uint8)}
        return tensors, values[codes] * widened(scales, size)

    return write


def mxfp6(exponent: int, weight: str = "weight") -> Writer:
    """Numbers with so many bits of exponent; the others of the five that are no sign are the mantissa's."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, exponents = draw(generator, 0, 64, out, size), draw(generator, 120, 124, out, size // 32)
        tensors = {weight: stream(codes, 6).view(torch.uint8), "weight_scale": exponents.to(torch.uint8)}
        mantissa = 5 - exponent
        power, fraction = (codes % 32) // 2**mantissa, (codes % 2**mantissa) / 2**mantissa
        bias = 2 ** (exponent - 1) - 1
        numbers = torch.where(power > 0, 2.0 ** (power - bias) * (1 + fraction), 2.0 ** (1 - bias) * fraction)
        return tensors, torch.where(codes < 32, 1, -1) * numbers * widened(2.0 ** (exponents - 127), size)

    return write


def nvfp4(weight: str, factor: str, *, divides: bool, group: int = 16) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = draw(generator, 0, 16, out, size)
        scales = (torch.rand(out, size // group, generator=generator) * 300 + 20).to(torch.float8_e4m3fn)
        number = torch.tensor(3000.0 if divides else 1 / 3000)
        tensors = {weight: pairs(codes), "weight_scale": scales, factor: number.reshape(1) if divides else number}
        wide = widened(scales.float(), size)
        return tensors, FP4[codes] * (wide / number if divides else wide * number)

    return write


def nvfp4_of_e5m3(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """AutoRound's: a byte of five bits of exponent and three of mantissa for 16 numbers, below 2^-14 without the 1."""
    codes, scales = draw(generator, 0, 16, out, size), draw(generator, 0, 12 * 8, out, size // 16)
    exponents, mantissas = scales // 8, scales % 8 / 8
    numbers = torch.where(exponents > 0, 2.0 ** (exponents - 15) * (1 + mantissas), 2.0**-14 * mantissas)
    tensors = {"weight_packed": pairs(codes), "weight_scale": scales.to(torch.uint8)}
    return tensors, FP4[codes] * widened(numbers, size)


def sparse24(kind: str) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scores = torch.rand(out, size // 4, 4, generator=generator)
        mask = (scores >= scores.topk(2, -1).values[..., 1:]).flatten(1)
        dense = float8(generator, out, size) if kind == "float8" else torch.randn(out, size, generator=generator) / 8
        scale = draw_scales(generator, 127, out, 1) if kind == "float8" else torch.ones(1)
        kept = dense.float()[mask].view(out, size // 2).to(dense.dtype)
        bits = torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
        tensors = {"compressed": kept, "bitmask": bits, "shape": torch.tensor([out, size])}
        if kind == "float8":
            tensors["weight_scale"] = scale
        return tensors, dense.float() * mask * scale

    return write


def sparse_marlin(bits: int, group: int | None) -> Writer:
    """compressed-tensors' marlin-24, number by number: where the thread that multiplies by it finds it."""

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scores = torch.rand(out, size // 4, 4, generator=generator)
        places = scores.topk(2, -1).indices.sort(-1).values.flatten(1).numpy()  # [out, kept]
        kept = draw(generator, 0, 1 << bits, out, size // 2).numpy()
        packed, meta = np.zeros((size // 32, 16 * out), int), np.zeros((size // 32) * 2 * out * 8, int)
        n, k = np.indices(kept.shape)
        half, row = k % 16 // 8, k % 8
        thread = n % 64 // 16 * 8 + n % 16 // 8 * 4 + row // 2
        in_word = {4: row % 2 * 4 + n % 8 // 4 * 2 + half, 8: n % 8 // 4 * 4 + row % 2 * 2 + half}[bits]
        packed[k // 16, n // 64 * 1024 + thread * 32 + n % 4 * 8 + in_word] = kept
        line = n // 64 * 64 + n % 4 // 2 * 32 + n % 64 // 8 * 4 + n % 2 * 2 + k // 8 % 2
        meta[((k // 16 * out + line) * 2 + n % 8 // 4) * 8 + k % 8] = places
        scales = draw_scales(generator, 1 << (bits - 1), out, 1 if group is None else size // group)
        stored = scales.t()
        if group is not None and group < size // 2:
            stored = stored.unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
        tensors = {
            "weight_packed": stream(torch.from_numpy(packed), bits), "scale_packed": stored.half(),
            "meta": stream(torch.from_numpy(meta).view(size // 32, -1), 2).view(torch.int16),
        }  # fmt: skip
        dense = torch.full((out, size // 4, 4), 1 << (bits - 1))
        dense.scatter_(2, torch.from_numpy(places).unflatten(1, (-1, 2)), torch.from_numpy(kept).unflatten(1, (-1, 2)))
        return tensors, (dense.flatten(1) - (1 << (bits - 1))) * widened(scales, size)

    return write


def sparse(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' sparse-bitmask: the numbers that are not zero, wherever they are."""
    dense = torch.randn(out, size, generator=generator) / 8
    mask = torch.rand(out, size, generator=generator) > 0.4
    counts = mask.sum(1)
    tensors = {
        "compressed": dense[mask], "shape": torch.tensor([out, size]), "row_offsets": counts.cumsum(0) - counts,
        "bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little")),
    }  # fmt: skip
    return tensors, dense * mask


def bnb_int8(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, largest = draw(generator, -127, 128, out, size).to(torch.int8), draw_scales(generator, 1, out)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * largest.unsqueeze(1) / 127


def bnb_blocks(kind: str, *, nested: bool) -> Writer:
    values = NF4 if kind == "nf4" else FP4 / 6

    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, num_blocks = draw(generator, 0, 16, out * size), out * size // 64
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [out, size],
        }  # fmt: skip
        tensors = {"weight": pairs(codes, first=1).unsqueeze(1), "weight.quant_map": values.clone()}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            stored, outer = draw(generator, 0, 256, num_blocks), draw_scales(generator, 1, -(-num_blocks // 256))
            inner = torch.linspace(-1, 1, 256)
            tensors |= {
                "weight.absmax": stored.to(torch.uint8), "weight.nested_absmax": outer,
                "weight.nested_quant_map": inner.clone(),
            }  # fmt: skip
            largest = inner[stored] * outer.repeat_interleave(256)[:num_blocks] + 0.25
        else:
            largest = tensors["weight.absmax"] = draw_scales(generator, 1, num_blocks)
        blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = blob
        return tensors, (values[codes] * largest.repeat_interleave(64)).view(out, size)

    return write


def hqq(bits: int, axis: int = 1, group: int = 32) -> Writer:
    def write(out: int, size: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        num_groups = out * size // group
        shape = (num_groups, group) if axis == 1 else (group, num_groups)
        codes = draw(generator, 0, 1 << bits, *shape)
        along = (num_groups, 1) if axis == 1 else (1, num_groups)
        scales = draw_scales(generator, 1 << (bits - 1), *along)
        zeros = torch.rand(along, generator=generator) * (1 << bits)
        per = 10 if bits == 3 else 8 // bits
        padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per))
        packed = torch.zeros(len(padded) // per, shape[1], dtype=torch.int64)
        for part in padded.chunk(per):
            packed = (packed << bits) | part
        tensors = {"W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), "scale": scales, "zero": zeros}
        return tensors, ((codes - zeros) * scales).view(out, size)

    return write


def _compressed(weights: dict[str, Any], form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def _packed(bits: int, group: int | None, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": True, **more}
    return _compressed(weights, "pack-quantized")


def _marlin(bits: int, group: int | None) -> dict[str, Any]:
    return _packed(bits, group) | {"format": "marlin-24"}


def _float(bits: int, form: str, **more: Any) -> dict[str, Any]:
    return _compressed({"num_bits": bits, "type": "float", **more}, form)


_GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def _hqq(bits: int, axis: int = 1) -> dict[str, Any]:
    params = {"nbits": bits, "group_size": 32, "axis": axis}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": params}, "skip_modules": ["lm_head"]}


FORMATS: dict[str, Format] = {
    "ct-int8": Format(
        _compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
        whole_bytes("int8", shape=by_output),
    ),
    "ct-int8-zeros": Format(
        _compressed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, "int-quantized"),
        int8_with_zeros,
    ),
    "ct-fp8-tensor": Format(
        _float(8, "float-quantized", strategy="tensor"), whole_bytes("float8", shape=lambda out, size: (1,))
    ),
    "ct-fp8-channel": Format(
        _float(8, "float-quantized", strategy="channel"), whole_bytes("float8", shape=by_output)
    ),
    "ct-fp8-block": Format(
        _float(8, "float-quantized", strategy="block", block_structure=[24, 40]), whole_bytes("float8", block=(24, 40))
    ),
    "ct-fp8-group": Format(
        _float(8, "float-quantized", strategy="group", group_size=32), whole_bytes("float8", block=(1, 32))
    ),
    "ct-int8-group": Format(
        _compressed({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}, "int-quantized"),
        whole_bytes("int8", block=(1, 32)),
    ),
    "ct-w4-channel": Format(_packed(4, None), packed_integers(4, None)),
    "ct-w4-tensor": Format(_packed(4, None), packed_integers_of_one_scale),
    "ct-w4-group": Format(_packed(4, 32), packed_integers(4, 32)),
    "ct-w4-zeros": Format(_packed(4, 16, symmetric=False), packed_integers(4, 16, zeros=True)),
    "ct-w4-order": Format(_packed(4, 32, actorder="group"), packed_integers(4, 32, order=True)),
    "ct-w8-group": Format(_packed(8, 32, symmetric=False), packed_integers(8, 32, zeros=True)),
    "ct-w3-group": Format(_packed(3, 32), packed_integers(3, 32, scale_dtype=torch.bfloat16)),
    "ct-nvfp4": Format(
        _float(4, "nvfp4-pack-quantized", group_size=16), nvfp4("weight_packed", "weight_global_scale", divides=True)
    ),
    "ct-nvfp4-e5m3": Format(_float(4, "nvfp4-e5m3-pack-quantized", group_size=16), nvfp4_of_e5m3),
    "ct-mxfp4": Format(_float(4, "mxfp4-pack-quantized", group_size=32), mxfp4("weight_packed")),
    "ct-mxfp6": Format(_float(6, "mxfp6-pack-quantized", group_size=32), mxfp6(2, "weight_packed")),
    "ct-mxfp8": Format(
        _float(8, "mxfp8-quantized", strategy="group", group_size=32),
        float8_with_exponents("weight_scale", (1, 32), torch.uint8),
    ),
    "ct-marlin-24": Format(_marlin(4, 32), sparse_marlin(4, 32)),
    "ct-marlin-24-bytes": Format(_marlin(8, None), sparse_marlin(8, None)),
    "ct-sparse": Format(_compressed({}, "dense"), sparse),
    "ct-sparse24": Format(_compressed({}, "dense"), sparse24("float32")),
    "ct-sparse24-fp8": Format(_float(8, "float-quantized", strategy="channel"), sparse24("float8")),
    **{f"gptq-{bits}": Format(_GPTQ | {"bits": bits}, gptq(bits)) for bits in (2, 3, 4, 8)},
    "gptq-zeros": Format(_GPTQ | {"bits": 4, "sym": False}, gptq(4, zeros=True)),
    "gptq-8-zeros": Format(_GPTQ | {"bits": 8, "sym": False}, gptq(8, zeros=True)),
    "gptq-v2": Format(_GPTQ | {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, zeros=True, shift=0)),
    "gptq-mixed": Format(_GPTQ | {"bits": 4, "dynamic": {".*[kv]_proj": {"bits": 8}}}, gptq_mixed),
    "gptq-order": Format(_GPTQ | {"bits": 4, "desc_act": True}, gptq(4, order=True)),
    "awq": Format(_AWQ, awq),
    **{f"awq-{bits}": Format(_AWQ | {"bits": bits}, awq_wide(bits)) for bits in (5, 8)},
    "awq-gemv": Format(_AWQ | {"version": "gemv"}, awq_gemv),
    "awq-gemv-fast": Format(_AWQ | {"version": "gemv_fast"}, awq_gemv_fast),
    "awq-gemv-fast-autoawq": Format(_AWQ | {"version": "gemv_fast"}, awq_gemv_fast_of_autoawq),
    "auto-round-gptq": Format(_ROUND | {"packing_format": "auto_round:auto_gptq"}, gptq(4)),
    "auto-round": Format(_ROUND | {"packing_format": "auto_round"}, gptq(4, shift=0)),
    "auto-round-zeros": Format(
        _ROUND | {"packing_format": "auto_round", "sym": False}, gptq(4, zeros=True, shift=0)
    ),
    "auto-round-awq": Format(_ROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    "auto-round-fp8-block": Format(
        _ROUND | {"quant_method": "auto_round:fp8", "bits": 8, "group_size": [32, 32], "data_type": "fp"},
        whole_bytes("float8", "weight_scale_inv", block=(32, 32)),
    ),
    "auto-round-mxfp8": Format(
        _ROUND | {"bits": 8, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"},
        float8_with_exponents("weight_scale", (1, 32), torch.uint8),
    ),
    "auto-round-int8": Format(
        _ROUND | {"bits": 8, "group_size": -1, "act_bits": 8, "packing_format": "auto_round:llm_compressor"},
        whole_bytes("int8", shape=lambda out, size: (out, 1)),
    ),
    "auto-round-fp4": Format(
        _ROUND | {"packing_format": "auto_round:llm_compressor"},
        mixed(mxfp4("weight_packed"), nvfp4("weight_packed", "weight_global_scale", divides=True)),
    ),
    "auto-round-nvfp4-e5m3": Format(
        _ROUND | {"data_type": "nvfp4_v2", "group_size": 16, "packing_format": "auto_round:llm_compressor_nvfp4_e5m3"},
        mixed(nvfp4_of_e5m3, float8_with_exponents("weight_scale", (1, 32), torch.uint8)),
    ),
    "auto-round-mxint4": Format(
        _ROUND | {"data_type": "mx_int", "packing_format": "auto_round"}, mxfp4("weight_packed", MX_INT4)
    ),
    "auto-round-fp8-weights": Format(
        {"quant_method": "auto-round", "bits": 8, "group_size": 0, "sym": True, "data_type": "fp", "fmt": "e4m3"},
        whole_bytes("float8", shape=lambda out, size: (out,)),
    ),
    "auto-round-fp8-static": Format(
        _ROUND | {"bits": 8, "group_size": -1, "data_type": "fp", "packing_format": "auto_round:fp8_static"},
        whole_bytes("float8", shape=lambda out, size: (out,)),
    ),
    "fp8-block": Format(
        _FP8 | {"weight_block_size": [32, 32]}, whole_bytes("float8", "weight_scale_inv", block=(32, 32))
    ),
    "fp8-block-exponents": Format(
        _FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        float8_with_exponents("weight_scale_inv", (32, 32), torch.float8_e8m0fnu),
    ),
    "fp8-tensor": Format(_FP8, whole_bytes("float8", shape=by_tensor)),
    "fbgemm": Format({"quant_method": "fbgemm_fp8"}, whole_bytes("float8", shape=by_output)),
    "bnb-int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "bnb-nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True}, bnb_blocks("nf4", nested=True),
    ),
    "bnb-fp4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        bnb_blocks("fp4", nested=False),
    ),
    **{f"hqq-{bits}": Format(_hqq(bits), hqq(bits)) for bits in (1, 2, 3, 4, 8)},
    "hqq-columns": Format(_hqq(4, 0), hqq(4, axis=0)),
}  # fmt: skip

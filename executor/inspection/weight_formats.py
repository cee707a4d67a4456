"""Random weights in each format that `quire bench ops` times."""

from collections.abc import Callable

import torch

from quire.executor.weights.quantization.formats import gguf_blocks
from quire.executor.weights.quantization.formats.bitsandbytes import NF4
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight

_GROUP = 32
"""Inputs that share a scale, in 4-bit formats; fewer if it does not divide the layer's inputs."""
_INT4 = torch.arange(-8, 8, dtype=torch.float32)
_NF4 = torch.tensor(NF4)
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of E2M1 (Open Compute Project, Microscaling Formats 1.0)."""


def _plain(dtype: torch.dtype) -> Callable[[int, int], LinearWeight]:
    return lambda out, size: (torch.rand(out, size) - 0.5).to(dtype)


def _int8(out: int, size: int) -> LinearWeight:
    codes = torch.randint(-127, 128, (out, size), dtype=torch.int8)
    return QuantizedWeight(codes, torch.rand(out, 1) / 1000)


def _fp8(
    codes: torch.dtype = torch.float8_e4m3fn, group: int | None = None, scales: torch.dtype = torch.float32
) -> Callable[[int, int], LinearWeight]:
    """Returns a maker of FP8 weights; `group` is None if all of an output's inputs share a scale."""

    def make(out: int, size: int) -> LinearWeight:
        groups = 1 if group is None else _groups(size, group)
        return QuantizedWeight((torch.rand(out, size) - 0.5).to(codes), (torch.rand(out, groups) / 1000).to(scales))

    return make


def _four_bits(
    table: torch.Tensor, group: int = _GROUP, scales: torch.dtype = torch.float16, *, has_offsets: bool = False
) -> Callable[[int, int], LinearWeight]:
    def make(out: int, size: int) -> LinearWeight:
        groups = _groups(size, group)
        codes = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8)
        offsets = (torch.rand(out, groups) / 100).to(scales) if has_offsets else None
        return QuantizedWeight(codes, (torch.rand(out, groups) / 1000).to(scales), table, offsets)

    return make


def _gguf(name: str) -> Callable[[int, int], LinearWeight]:
    """Returns a maker of weights in the form that blocks of ggml's type `name` have with 16-bit activations."""
    layout = gguf_blocks.FORMATS[name].layout
    values = None if layout.table is None else torch.tensor(layout.table)

    def make(out: int, size: int) -> LinearWeight:
        groups = _groups(size, layout.group_size)
        if values is None:
            codes = torch.randint(-127, 128, (out, size), dtype=torch.int8)
        else:
            codes = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8)
        offsets = (torch.rand(out, groups) / 100).half() if layout.has_offsets else None
        return QuantizedWeight(codes, (torch.rand(out, groups) / 1000).half(), values, offsets, has_byte_inputs=True)

    return make


def _groups(size: int, group: int) -> int:
    """Counts the groups of `size` inputs."""
    return size // (group if size % group == 0 else 2)


FORMATS: dict[str, Callable[[int, int], LinearWeight]] = {
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    "fp32": _plain(torch.float32),
    "int8": _int8,
    "fp8": _fp8(),
    "fp8_e5m2": _fp8(torch.float8_e5m2),
    "fp8_block": _fp8(group=128),
    "mxfp8": _fp8(group=32, scales=torch.bfloat16),
    "int4": _four_bits(_INT4),
    "int4_g64": _four_bits(_INT4, 64),
    "int4_g128": _four_bits(_INT4, 128),
    "int4_zero": _four_bits(_INT4, 128, torch.float32, has_offsets=True),
    "nf4": _four_bits(_NF4, 64, torch.float32),
    "fp4": _four_bits(_FP4),
    "nvfp4": _four_bits(_FP4, 16, torch.float32),
    **{name.lower(): _gguf(name) for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")},
}
"""Functions of (out, in) by name. Scales are for each output, or for groups in 4-bit formats and blocks.

`int4_zero` has zero points, as most checkpoints of AWQ. In the kernels Q4_0 is int4, Q4_1 is Q4_K, Q5_0 is Q8_0 and
Q5_1 is Q5_K.
"""

_MULTIPLIED = {
    **dict.fromkeys(("fp32", "fp16"), "float32"),
    **dict.fromkeys(("int8", "q8_0", "q6_k", "q5_k"), "int8"),
    **dict.fromkeys(("int4", "int4_g64", "int4_g128", "int4_zero", "q4_k", "q3_k", "q2_k"), "int4"),
}

ACTIVATIONS = {"fp16": torch.float16, "fp32": torch.float32}
"""The dtypes of activations by format; bfloat16 for all others."""


def activation_dtype(name: str) -> torch.dtype:
    """Returns the dtype of the activations for a weight format."""
    return ACTIVATIONS.get(name, torch.bfloat16)


def multiplied(name: str, *, is_weight: bool) -> str:
    """Returns the number format whose products are fastest for this one, as `ops_timing` names it.

    Keys and values are never multiplied as bytes, because the weights of attention need more precision.
    """
    kind = _MULTIPLIED.get(name, "bfloat16")
    return kind if is_weight or kind == "float32" else "bfloat16"

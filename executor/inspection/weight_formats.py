"""Random weights in each format that `quire bench ops` times."""

from collections.abc import Callable

import torch

from quire.ops.backend import LinearWeight
from quire.ops.quantised import QuantisedWeight

_GROUP = 32
"""Inputs that share a scale, in formats of four bits; less where the layer's inputs do not divide by it."""
_INT4 = torch.arange(-8, 8, dtype=torch.float32)
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of E2M1 (Open Compute Project, Microscaling Formats 1.0)."""


def _plain(dtype: torch.dtype) -> Callable[[int, int], LinearWeight]:
    return lambda out, size: (torch.rand(out, size) - 0.5).to(dtype)


def _int8(out: int, size: int) -> LinearWeight:
    codes = torch.randint(-127, 128, (out, size), dtype=torch.int8)
    return QuantisedWeight(codes, torch.rand(out, 1) / 1000)


def _fp8(out: int, size: int) -> LinearWeight:
    codes = (torch.rand(out, size) - 0.5).to(torch.float8_e4m3fn)
    return QuantisedWeight(codes, torch.rand(out, 1) / 1000)


def _four_bits(table: torch.Tensor) -> Callable[[int, int], LinearWeight]:
    def make(out: int, size: int) -> LinearWeight:
        group = _GROUP if size % _GROUP == 0 else 2
        codes = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8)
        return QuantisedWeight(codes, (torch.rand(out, size // group) / 1000).half(), table)

    return make


FORMATS: dict[str, Callable[[int, int], LinearWeight]] = {
    "bf16": _plain(torch.bfloat16),
    "fp16": _plain(torch.float16),
    "fp32": _plain(torch.float32),
    "int8": _int8,
    "fp8": _fp8,
    "int4": _four_bits(_INT4),
    "fp4": _four_bits(_FP4),
}
"""By name, a function of (out, in). Scales are for each output, or of groups where there are four bits."""

ACTIVATIONS = {"fp16": torch.float16, "fp32": torch.float32}
"""Dtypes of activations by format; bfloat16 for all others."""


def activation_dtype(name: str) -> torch.dtype:
    """The dtype of what is multiplied by weights of the format."""
    return ACTIVATIONS.get(name, torch.bfloat16)

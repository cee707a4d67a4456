"""Types of a kernel's arguments, and what a compiled form of a kernel depends on."""

from typing import NamedTuple

import torch

CONSTANT = "constexpr"
ALIGNMENT = 16
"""Bytes to whose multiples pointers are aligned, so that loads are as wide as the hardware allows."""
TYPES = {
    torch.bool: "u1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
}
"""Triton's name of each type of tensor."""
POINTER_TYPES = {dtype: f"*{name}" for dtype, name in TYPES.items()}
SCALARS = {"i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
"""Types that a scalar argument may have, and their letters in `struct`."""


class Specialization(NamedTuple):
    """The conditions of a compiled form of a kernel, apart from its source and the card.

    Attributes:
        types: Triton's type of each parameter, in order; `constexpr` for those in `constants`.
        constants: names and values, in the order of the parameters.
        unaligned: names of pointers that are not multiples of `ALIGNMENT`.
        num_warps: warps of a program.
        num_stages: depth of the pipeline.
    """

    types: tuple[str, ...]
    constants: tuple[tuple[str, object], ...]
    unaligned: tuple[str, ...]
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        types = ", ".join(each for each in self.types if each != CONSTANT)
        constants = "".join(f", {name}={value}" for name, value in self.constants)
        unaligned = f", unaligned: {' '.join(self.unaligned)}" if self.unaligned else ""
        return f"({types}{constants}, num_warps={self.num_warps}, num_stages={self.num_stages}{unaligned})"

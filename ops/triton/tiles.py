"""What kernels of rows and elements have in common: their types, and how wide their loads are."""

import torch
import triton.language as tl
from torch import Tensor

FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Types of tensors that kernels compute with, which they do in float32, and Triton's names for them."""

USUAL = ("bf16", "fp16")
"""The types whose kernels are compiled ahead: those of nearly all checkpoints, and of AWQ and GPTQ's."""

VECTOR = 8
"""Numbers whose 16 bytes, in half precision, are one load."""

UNIT = tl.constexpr(VECTOR)
"""`VECTOR` inside kernels. They get sizes and strides in vectors, and multiply them: so the compiler knows that rows
begin at multiples of a load. A hint by `tl.multiple_of` on an argument has no effect.
"""

_BYTES = 16


def are_whole(*numbers: int) -> bool:
    """Returns True if all sizes and strides are whole vectors. Others are left to torch, which no model's are."""
    return not any(number % VECTOR for number in numbers)


def are_aligned(*tensors: Tensor) -> bool:
    """Returns True if all tensors begin at a multiple of a load, as kernels are compiled for."""
    return not any(tensor.data_ptr() % _BYTES for tensor in tensors)

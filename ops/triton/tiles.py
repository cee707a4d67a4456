"""What kernels of rows and elements have in common: how wide their loads may be."""

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Types of tensors that kernels compute with; they do so in float32."""

VECTOR = 8
"""Numbers whose 16 bytes, in half precision, are one load."""

_BYTES = 16


def unit_of(*numbers: int) -> int:
    """The unit in which a kernel gets its sizes and strides: `VECTOR` if it divides all of them, else 1.

    A kernel multiplies them by it, so the compiler knows that rows begin at multiples of a load. A hint by
    `tl.multiple_of` on an argument has no effect.
    """
    return 1 if any(number % VECTOR for number in numbers) else VECTOR


def are_aligned(*tensors: Tensor) -> bool:
    """Returns True if all tensors begin at a multiple of a load, as kernels are compiled for."""
    return not any(tensor.data_ptr() % _BYTES for tensor in tensors)

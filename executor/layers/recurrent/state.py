"""The state of a recurrent layer for a sequence, whose size does not depend on the sequence's length."""

import math
from typing import NamedTuple

import torch


class LayerState(NamedTuple):
    """The state tensors that one recurrent layer keeps of a sequence, on one rank.

    Attributes:
        shapes: of each tensor, such as [width - 1, channels] for a convolution.
        dtypes: of each tensor.
        num_first_rows: rows that initialize the state. A new sequence's first step computes them besides its tokens.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    num_first_rows: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

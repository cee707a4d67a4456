"""What a recurrent layer keeps of a sequence: a state of fixed size, however long the sequence."""

import math
from typing import NamedTuple

import torch


class LayerState(NamedTuple):
    """The state that one recurrent layer keeps of a sequence, on one rank: some tensors.

    Attributes:
        shapes: of each tensor, such as [width - 1, channels] of a convolution.
        dtypes: of each tensor.
        num_first_rows: rows that make it of a new sequence, which the first step computes beside the tokens' own.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    num_first_rows: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

"""What a recurrent layer keeps of a sequence: a state of fixed size, however long the sequence."""

import math
from typing import NamedTuple

import torch


class LayerState(NamedTuple):
    """The state that one recurrent layer keeps of a sequence, on one rank: some tensors.

    Attributes:
        shapes: of each tensor, such as [width - 1, channels] of a convolution.
        dtypes: of each tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

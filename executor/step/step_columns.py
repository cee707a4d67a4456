"""Columns of values that lie one behind the other in the memory of a step's inputs, on the host and on the device."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 128
"""Bytes that the start of each column is a multiple of."""


class StepColumn(NamedTuple):
    """The place of one column in the memory of a step.

    Attributes:
        start: its first byte.
        dims: its shape.
    """

    start: int
    dtype: torch.dtype
    dims: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.dims) * self.dtype.itemsize

    @property
    def next_start(self) -> int:
        """The first byte of the column behind it."""
        return -(-self.stop // _ALIGNMENT) * _ALIGNMENT

    def of(self, memory: Tensor) -> Tensor:
        """Returns the column in `memory`, the bytes of the host or the device."""
        return memory[self.start : self.stop].view(self.dtype).view(self.dims)


def lay_out(kinds: Iterable[tuple[torch.dtype, tuple[int, ...]]], start: int = 0) -> list[StepColumn]:
    """Returns columns of these types and shapes, from the byte `start` on."""
    columns: list[StepColumn] = []
    for dtype, dims in kinds:
        columns.append(StepColumn(start, dtype, dims))
        start = columns[-1].next_start
    return columns

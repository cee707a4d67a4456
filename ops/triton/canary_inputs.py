"""Cases of the canary, and their inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNDECIDED = "undecided: "
"""Begins a finding that is of the card's other work, and not of kernels."""


class Case(NamedTuple):
    """A case.

    Attributes:
        name: of the case.
        operations: methods of the backend that plain torch serves if the case fails.
        run: computes results on a backend, from inputs that are the same at each call.
    """

    name: str
    operations: tuple[str, ...]
    run: Callable[[Any, "Inputs"], list[Tensor]]


class Inputs:
    """Makes the inputs of a case; they depend on the order of calls alone."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._random = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Numbers of the normal distribution, times `scale`."""
        return (torch.randn(shape, generator=self._random) * scale).to(self.dtype).to(self.device)

    def ids(self, count: int, end: int) -> Tensor:
        """[count] int64, each at least 0 and below `end`."""
        return torch.randint(end, (count,), generator=self._random).to(self.device)

    def place(self, values: Any, dtype: torch.dtype) -> Tensor:
        """A tensor of these values."""
        return torch.as_tensor(values, dtype=dtype).to(self.device)

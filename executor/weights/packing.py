"""Provides a model's packed weights: read and packed now, or packed before (`packed_state.py`).

Layers pass a function that reads a weight, and receive it packed. So a start from packed files reads and computes
nothing that packing has done already.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.ops.backend import Backend
from quire.ops.experts import ExpertWeights
from quire.ops.linear import LinearWeight

ReadLinear = Callable[[], tuple[LinearWeight, Tensor | None]]
"""Reads the weight [out, in] and the bias [out] of a linear layer."""
ReadProducts = Callable[[], Sequence[tuple[LinearWeight, Tensor | None]]]
"""Reads several products with the same input, as `ReadLinear` reads one."""
ReadExperts = Callable[[], Iterable[ExpertWeights]]


class Packing(Protocol):
    """Hands out packed weights, in the order in which a model's layers ask for them."""

    def linear(self, read: ReadLinear) -> Any:
        """Packs the weight for `Backend.linear`."""
        ...

    def products(self, read: ReadProducts) -> list[Any]:
        """Packs the weights for `Backend.linear`, one for each product that is read."""
        ...

    def gated(self, read: ReadProducts) -> list[Any]:
        """Packs gates and their ups: one weight for `Backend.gated_linear`; or, if two are read, as `products`."""
        ...

    def experts(self, read: ReadExperts, num_experts: int) -> Any:
        """Packs a layer's experts for `Backend.experts`."""
        ...

    def dequantized(self, read: Callable[[], Tensor]) -> Tensor:
        """Reads a weight that stays a plain tensor, dequantized if the checkpoint has it quantized."""
        ...

    def rows(self, read: Callable[[], LinearWeight]) -> Any:
        """Packs a weight for row lookups: a tensor for `Backend.take_rows`, or a packed one for `take_packed_rows`."""
        ...

    def shared(self, read: ReadLinear) -> tuple[Any, Any]:
        """Packs a weight as `linear` and as `rows`: once in memory, if the backend can."""
        ...


class PackAtLoad:
    """Reads each weight and has the backend pack it."""

    def __init__(self, ops: Backend[Any, Any, Any]) -> None:
        self._ops = ops

    def linear(self, read: ReadLinear) -> Any:
        return self._ops.pack_linear(*read())

    def products(self, read: ReadProducts) -> list[Any]:
        return [self._ops.pack_linear(*each) for each in read()]

    def gated(self, read: ReadProducts) -> list[Any]:
        products = read()
        return [self._ops.pack_gated_linear(*products[0])] if len(products) == 1 else self.products(lambda: products)

    def experts(self, read: ReadExperts, num_experts: int) -> Any:
        return self._ops.pack_experts(read(), num_experts)

    def dequantized(self, read: Callable[[], Tensor]) -> Tensor:
        return read()

    def rows(self, read: Callable[[], LinearWeight]) -> Any:
        rows = read()
        return rows if isinstance(rows, Tensor) else self._ops.pack_linear(rows)

    def shared(self, read: ReadLinear) -> tuple[Any, Any]:
        weight, bias = read()
        packed = self._ops.pack_linear(weight, bias)
        return packed, packed if self._ops.has_rows(packed) else weight

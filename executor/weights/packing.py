"""Where a model's packed weights come from: they are read and packed now, or were packed before (`packed_state.py`).

Layers say how a weight is read, and are given it packed. So a start from packed files reads and computes nothing that
packing has done.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.ops.backend import Backend, ExpertWeights, LinearWeight

ReadLinear = Callable[[], tuple[LinearWeight, Tensor | None]]
"""Reads the weight [out, in] and the bias [out] of a linear layer."""
ReadProducts = Callable[[], Sequence[tuple[LinearWeight, Tensor | None]]]
"""As `ReadLinear`, of several products with the same input."""
ReadExperts = Callable[[], Iterable[ExpertWeights]]


class Packing(Protocol):
    """Hands out weights in a backend's layout, in the order in which a model's layers ask for them."""

    def linear(self, read: ReadLinear) -> Any:
        """The weight for `Backend.linear`."""
        ...

    def products(self, read: ReadProducts) -> list[Any]:
        """The weights for `Backend.linear` of as many products as are read."""
        ...

    def gated(self, read: ReadProducts) -> list[Any]:
        """Of gates and their ups: one weight for `Backend.gated_linear`; or, if two are read, as `products`."""
        ...

    def experts(self, read: ReadExperts, num_experts: int) -> Any:
        """A layer's experts for `Backend.experts`."""
        ...

    def numbers(self, read: Callable[[], Tensor]) -> Tensor:
        """A weight that is kept as plain numbers, whatever the checkpoint's format."""
        ...

    def rows(self, read: Callable[[], LinearWeight]) -> Any:
        """A weight whose rows are taken: a tensor for `Backend.take_rows`, or codes for `take_packed_rows`."""
        ...

    def shared(self, read: ReadLinear) -> tuple[Any, Any]:
        """What `linear` gives, and the same weight as `rows` gives it: once in memory, if the backend can."""
        ...


class PackAtLoad:
    """See `Packing`: reads each weight and has the backend pack it."""

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

    def numbers(self, read: Callable[[], Tensor]) -> Tensor:
        return read()

    def rows(self, read: Callable[[], LinearWeight]) -> Any:
        rows = read()
        return rows if isinstance(rows, Tensor) else self._ops.pack_linear(rows)

    def shared(self, read: ReadLinear) -> tuple[Any, Any]:
        weight, bias = read()
        packed = self._ops.pack_linear(weight, bias)
        return packed, packed if self._ops.has_rows(packed) else weight

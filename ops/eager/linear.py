"""Layouts for the weights of linear layers in torch; `EagerBackend` is constructed with one of them."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from quire.ops.linear import PackedLinear


class LinearLayers(Protocol[PackedLinear]):
    """A layout of weights, and the product with weights in it.

    Attributes:
        layout: as `Backend.layout`.
        packed_types: as `Backend.packed_types`.
    """

    packed_types: tuple[type, ...]

    @property
    def layout(self) -> str: ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Packs `weight` [out, in] (and `bias` [out]) in this layout."""
        ...

    def multiply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """`x @ weight.T + bias`; a row's result does not depend on the number of rows."""
        ...

    def plain(self, packed: PackedLinear) -> Tensor | None:
        """Returns the weight [out, in] itself, if this layout has left it unchanged."""
        ...


class PlainLinear:
    """Keeps weight and bias unchanged."""

    layout = "plain"
    packed_types: tuple[type, ...] = ()

    def pack(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return weight, bias

    def multiply(self, x: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
        return F.linear(x, *packed)

    def plain(self, packed: tuple[Tensor, Tensor | None]) -> Tensor:
        return packed[0]

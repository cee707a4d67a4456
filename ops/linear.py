"""Linear layers: their weights as every backend packs them, and the products with packed weights."""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.quantized import QuantizedWeight

LinearWeight = Tensor | QuantizedWeight
"""The weight of a linear layer, [out, in], in a form that every backend packs."""

PackedLinear = TypeVar("PackedLinear")
"""A weight in the backend's layout: from `pack_linear` for `linear`, or from `pack_gated_linear` for `gated_linear`."""


class LowRankWeights(NamedTuple):
    """Low-rank weights that adapters add to those of linear layers with the same input (LoRA, arXiv:2106.09685).

    Adapter n adds `b[n] @ a[n]` to a layer's weight, by the layer's part of the rows of `a` and of the columns of `b`.
    Both are in the dtype of the layers' inputs, and all tensors are dense.

    Attributes:
        a: [num_adapters, num_layers * rank, in]: the rows of each layer after those of the previous one.
        b: [num_adapters, rank, sum of `sizes`]: each layer's outputs after those of the previous one.
        sizes: the number of each layer's outputs.
        ranks: [num_adapters] int64; rows of `a` and `b` from there on, of each layer, are zeros. None: `rank` for all.
        factors, shifts: [num_adapters, sum of `sizes`] float32; an output and its products are multiplied by the
            factor, and the shift is added. Both are None: 1 and 0.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    ranks: Tensor | None = None
    factors: Tensor | None = None
    shifts: Tensor | None = None


class LinearOperations(ABC, Generic[PackedLinear]):
    """Linear layers on one kind of device."""

    @abstractmethod
    def pack_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear:
        """Packs `weight` [out, in] (and `bias` [out]) in the backend's layout; the caller then drops the original.

        Tensors on torch's meta device are packed into such tensors, as large as those of real weights would be.
        """

    @abstractmethod
    def has_rows(self, packed: PackedLinear) -> bool:
        """Returns True if `take_packed_rows` takes a weight from `pack_linear`. It takes all of a `QuantizedWeight`."""

    @abstractmethod
    def take_packed_rows(self, packed: PackedLinear, index: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Looks up rows of a weight [rows, size] that `pack_linear` packed, dequantized to `dtype`: [n, size].

        They equal those of `dequantize(weight, dtype)`, except that the sum of product and offset may be rounded once.
        """

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedLinear, activation: PlainActivation | None = None) -> Tensor:
        """Maps `x` [num_tokens, in] to [num_tokens, out], and with an `activation` runs `activate` on the outputs."""

    @abstractmethod
    def pack_gated_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear:
        """Packs a `weight` [gate | up, in], as `pack_linear` does; only `gated_linear` takes the result."""

    @abstractmethod
    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """Runs `activate_and_mul` on a linear layer's outputs: `x` [num_tokens, in] → [num_tokens, size]."""

    @abstractmethod
    def add_low_rank(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
        """Adds the products of `x` [num_tokens, in] with each token's adapter to `out` [num_tokens, out], perhaps in
        place.

        `adapters` [num_tokens] int64 has each token's adapter, or -1 for none. The sum is rounded once, and
        the products with `a` may be rounded to the inputs' dtype.
        """

    @abstractmethod
    def gated_low_rank(
        self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        """Runs `activate_and_mul` on the result of `add_low_rank`, for gates and ups `out`: [num_tokens, size].

        `out` is undefined afterwards.
        """

"""Operations on single elements or rows of hidden states: norms, activations, sums, rotations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation


class ElementwiseOperations(ABC):
    """Norms, activations, sums and rotations on one kind of device."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension (arXiv:1910.07467).

        `x` is [..., size]; `weight` is [size], or [heads, size] for an `x` of [..., heads, size]. The product with the
        weight is computed in the weight's dtype, which is `x`'s or float32; the result has `x`'s.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(x + residual), x + residual)`; `residual` may be overwritten."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm over the last dimension (arXiv:1607.06450), computed in float32 and rounded once.

        `x` is [..., size]; `weight` is like `rms_norm`'s, or None for ones; `bias` is [size], or None for zeros, of the
        weight's dtype.
        """

    @abstractmethod
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`(layer_norm(x + residual), x + residual)` of rows [num_tokens, size]; `residual` may be overwritten."""

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Computes `x + residual`, perhaps in place of `residual`; both are [num_tokens, size]."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins the columns of all `parts`, each [num_tokens, its size]: [num_tokens, sum of the sizes]."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float, softcap: float | None = None) -> Tensor:
        """Computes `factor * x`, capped as in `AttentionForm.softcap`, perhaps in place of `x` [num_tokens, size]."""

    @abstractmethod
    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        """Applies the activation to each element of `x` [num_tokens, size], perhaps in place."""

    @abstractmethod
    def activate_and_mul(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """Maps [num_tokens, 2 * size], gates, then ups, to their activation [num_tokens, size] (arXiv:2002.05202)."""

    @abstractmethod
    def rotation(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `rotary`, both [num_tokens, 1, rotary_dim] of `dtype`.

        `positions` is [num_tokens] int64; `frequencies` [rotary_dim / 2] float32, radians a position; `scale`
        multiplies both.
        """

    @abstractmethod
    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates pairs (i, i + rotary_dim / 2) of the first `rotary_dim` of each head (arXiv:2104.09864, NeoX order).

        `x` is [num_tokens, heads, head_dim]; `cos` and `sin` are [num_tokens, 1, rotary_dim] with `sin`'s first half
        negated, of `x`'s dtype.
        """

    @abstractmethod
    def take_rows(self, x: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
        """Looks up rows of `x` [rows, size] at `index` [n] int64, times `scale`: [n, size]."""

"""Norms as layers: root-mean-square norm, and layer norm."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.executor.layers.context import ModelContext


class Norm(Protocol):
    """A norm of rows [num_tokens, size]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes the rows."""
        ...

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns `(norm(x + residual), x + residual)`; `residual` may be overwritten. Without one, `(norm(x), x)`."""
        ...


@dataclass(frozen=True)
class NormStyle:
    """The storage and the formula of a family's norms.

    Attributes:
        eps: added to the mean square.
        is_offset: the checkpoint stores the weight minus 1. The product with the weight is computed in float32, because
            adding 1 to a small value loses most of its digits in a half-precision type.
        is_wide: the product with the weight is computed in float32 in any case.
        is_centred: layer norm (arXiv:1607.06450), not root-mean-square norm.
        has_weight: and `has_bias`: the parameters of a layer norm.
    """

    eps: float
    is_offset: bool = False
    is_wide: bool = False
    is_centred: bool = False
    has_weight: bool = True
    has_bias: bool = False

    def layer(self, context: ModelContext, name: str, size: int) -> Norm:
        """Builds the norm called `name`."""
        return (LayerNorm if self.is_centred else RMSNorm)(context, name, size, self)

    def read(self, context: ModelContext, name: str, size: int) -> Tensor:
        """Reads the weight [size] of the norm called `name`."""
        stored = context.read(f"{name}.weight", (size,))
        # In place, on a copy: in a dry build, an out-of-place sum imports torch's compiler.
        if self.is_offset:
            return stored.to(torch.float32, copy=True).add_(1)
        return stored.to(torch.float32) if self.is_wide else stored


class RMSNorm:
    """Runs `rms_norm` with the checkpoint's weight."""

    def __init__(self, context: ModelContext, name: str, size: int, style: NormStyle) -> None:
        self._ops = context.ops
        self._weight = style.read(context, name, size)
        self._eps = style.eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """Runs `layer_norm` with the checkpoint's weight and bias, if it has them."""

    def __init__(self, context: ModelContext, name: str, size: int, style: NormStyle) -> None:
        self._ops = context.ops
        self._weight = style.read(context, name, size) if style.has_weight else None
        self._bias = context.read(f"{name}.bias", (size,)) if style.has_bias else None
        self._eps = style.eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        return self._ops.add_layer_norm(x, residual, self._weight, self._bias, self._eps)

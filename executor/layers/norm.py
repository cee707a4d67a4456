"""Root-mean-square norm as a layer."""

from torch import Tensor

from quire.executor.layers.context import ModelContext


class RMSNorm:
    """`rms_norm` with the checkpoint's weight; with a residual, adds it first and returns the sum too."""

    def __init__(self, context: ModelContext, name: str, size: int, eps: float) -> None:
        self._ops = context.ops
        self._weight = context.read(f"{name}.weight", (size,))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`; `residual` may be overwritten."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)

"""The operations as Triton kernels; what has none yet runs in plain torch."""

from torch import Tensor

from quire.ops.backend import Activation
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.quantized import QuantizedLayer
from quire.ops.triton import norms
from quire.ops.triton.linear import PlainWeight, TritonLinear


class TritonBackend(EagerBackend[PlainWeight]):
    """A backend for accelerators. Each operation that is defined here replaces that of `EagerBackend`."""

    def __init__(self) -> None:
        self._products = TritonLinear()
        super().__init__(self._products)

    def gated_linear(self, x: Tensor, packed: PlainWeight | QuantizedLayer, activation: Activation = "silu") -> Tensor:
        out = None if isinstance(packed, QuantizedLayer) else self._products.multiply_gated(x, packed, activation)
        return super().gated_linear(x, packed, activation) if out is None else out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = norms.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps) if out is None else out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = norms.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps) if out is None else (out, residual)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        out = norms.layer_norm(x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps) if out is None else out

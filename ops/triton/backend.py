"""The operations as Triton kernels; what has none yet runs in plain torch."""

from torch import Tensor

from quire.ops.backend import Activation
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.quantized import QuantizedLayer
from quire.ops.triton import norms, rotate_store
from quire.ops.triton.linear import PlainWeight, TritonLinear
from quire.ops.triton.quantized import TritonQuantized


class TritonBackend(EagerBackend[PlainWeight]):
    """A backend for accelerators. Each operation that is defined here replaces that of `EagerBackend`."""

    def __init__(self) -> None:
        self._products = TritonLinear()
        self._coded_products = TritonQuantized(self._products)
        super().__init__(self._products, self._coded_products)
        self.packed_types = (*self.packed_types, *TritonQuantized.packed_types)

    def gated_linear(self, x: Tensor, packed: PlainWeight | QuantizedLayer, activation: Activation = "silu") -> Tensor:
        if isinstance(packed, QuantizedLayer):
            out = self._coded_products.multiply_gated(x, packed, activation)
        else:
            out = self._products.multiply_gated(x, packed, activation)
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

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
    ) -> None:
        if not rotate_store.covers(k, kv_cache):
            return super().write_kv(k, v, kv_cache, slot_mapping, scales)
        return rotate_store.write_kv(k, v, kv_cache, slot_mapping, scales)

    def rotate_and_store(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        is_interleaved: bool = False,
        scales: Tensor | None = None,
    ) -> Tensor:
        if not rotate_store.covers(heads, kv_cache):
            return super().rotate_and_store(
                heads, cos, sin, kv_cache, slot_mapping, norm=norm, is_interleaved=is_interleaved, scales=scales
            )
        return rotate_store.rotate_and_store(
            heads, cos, sin, kv_cache, slot_mapping, norm=norm, is_interleaved=is_interleaved, scales=scales
        )

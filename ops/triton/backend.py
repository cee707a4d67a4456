"""The operations as Triton kernels; what has none yet runs in plain torch."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.backend import AttentionForm, DeviceRows, ModelNeeds, NewHeads
from quire.ops.cache_pages import ScalePlanes
from quire.ops.eager.attention_plan import AttentionPlan
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.experts import GroupedExperts
from quire.ops.eager.latent import EagerLatent
from quire.ops.eager.linear import PlainLinear
from quire.ops.eager.quantized import DequantizedLinear, QuantizedLayer
from quire.ops.eager.recurrent import EagerRecurrent
from quire.ops.eager.sampling import EagerSampling
from quire.ops.experts import ExpertCall
from quire.ops.latent import Selection
from quire.ops.linear import LowRankWeights
from quire.ops.recording import Recording
from quire.ops.routing import ExpertRouter
from quire.ops.triton import elementwise, experts, graphs, norms, rotate_store, routing, selected_attention
from quire.ops.triton.adapted_experts import takes_adapters
from quire.ops.triton.attention import Attention, covers, covers_rotation
from quire.ops.triton.batch import TritonBatch
from quire.ops.triton.kv_rows import KINDS
from quire.ops.triton.latent import TritonLatent
from quire.ops.triton.linear import PlainWeight, TritonLinear
from quire.ops.triton.low_rank import LowRankProducts
from quire.ops.triton.quantized import TritonQuantized
from quire.ops.triton.recurrent import TritonRecurrent
from quire.ops.triton.sampling import TritonSampling


class TritonBackend(EagerBackend[PlainWeight]):
    """A backend for accelerators. Each operation that is defined here replaces that of `EagerBackend`."""

    recording_rules = graphs.RULES

    def __init__(
        self,
        without: Collection[str] = (),
        find_broken: Callable[[], Collection[str]] = lambda: (),
        *,
        compile_caches: Callable[[Collection[str]], None] = lambda kinds: None,
        is_invariant: bool = False,
    ) -> None:
        """Takes the operations `without` kernels, which plain torch serves.

        `find_broken` returns more of them; it is asked when the model is there, and may wait. `compile_caches` then
        compiles the kernels of the kinds of quantized caches that the model has (`kv_rows.KINDS`). If `is_invariant`,
        the bits of a row of linear layers are the same for all numbers of rows, and those of recurrent layers for all
        cuts of a prompt.
        """
        self._products = TritonLinear(is_invariant=is_invariant)
        self._low_rank = LowRankProducts(is_invariant=is_invariant)
        super().__init__(self._products, TritonQuantized(self._products), ScalePlanes())
        self.packed_types = (*self.packed_types, *TritonQuantized.packed_types)
        self._attention: Attention | None = None  # made on the first tensor's device
        self._recorder = graphs.GraphRecorder()
        self.recurrent: EagerRecurrent = TritonRecurrent(is_invariant=is_invariant)
        self.sampling = TritonSampling()
        self.latent = TritonLatent(self.rms_norm, self.rotary, self._attention_of)
        self._find_broken = find_broken
        self._compile_caches = compile_caches
        self._is_one_kernel = True  # `rotate_and_attend`
        self.leave_to_torch(without)

    def leave_to_torch(self, operations: Collection[str]) -> None:
        """Serves these operations by plain torch from now on.

        `sampling` means all operations of sampling, `latent` those of latent attention, `recurrent` those of recurrent
        layers, and `quantized` the layers with quantized weights.
        """
        for name in set(operations) - {"sampling", "quantized", "latent", "recurrent"}:
            setattr(self, name, getattr(EagerBackend, name).__get__(self))
        if not {"rotate_and_store", "attention"}.isdisjoint(operations):
            self._is_one_kernel = False
        if "linear" in operations:
            self._linear_layers = PlainLinear()
        if not {"linear", "quantized"}.isdisjoint(operations):
            self._quantized = DequantizedLinear(self._linear_layers)
        if "recurrent" in operations:
            self.recurrent = EagerRecurrent()
        if "sampling" in operations:
            self.sampling = EagerSampling()
        if "latent" in operations or not isinstance(self.latent, TritonLatent):
            self.latent = EagerLatent(self.rms_norm, self.rotary)
        elif not {"rms_norm", "rotary"}.isdisjoint(operations):
            self.latent = TritonLatent(self.rms_norm, self.rotary, self._attention_of)

    def prepare(self, needs: ModelNeeds) -> None:
        self.leave_to_torch(self._find_broken())
        if kinds := {KINDS[dtype] for dtype in needs.cache_dtypes if dtype in KINDS}:
            self._compile_caches(kinds)
        super().prepare(needs)

    def gated_linear(self, x: Tensor, packed: PlainWeight | QuantizedLayer, activation: Activation = "silu") -> Tensor:
        if not isinstance(packed, QuantizedLayer):
            out = self._products.multiply_gated(x, packed, activation)
        elif isinstance(self._quantized, TritonQuantized):
            out = self._quantized.multiply_gated(x, packed, activation)
        else:
            out = None
        return super().gated_linear(x, packed, activation) if out is None else out

    def add_low_rank(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
        return out if self._low_rank.add(x, out, weights, adapters) else super().add_low_rank(x, out, weights, adapters)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = norms.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps) if out is None else out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = norms.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps) if out is None else (out, residual)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        out = norms.layer_norm(x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps) if out is None else out

    def scale(self, x: Tensor, factor: float, softcap: float | None = None) -> Tensor:
        if softcap is not None and elementwise.scale(x, factor, softcap):
            return x
        return super().scale(x, factor, softcap)

    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        out = elementwise.activate(x, activation)
        return super().activate(x, activation) if out is None else out

    def activate_and_mul(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        out = elementwise.activate_and_mul(x, activation)
        return super().activate_and_mul(x, activation) if out is None else out

    def rotation(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        tables = elementwise.rotation(positions, frequencies, scale, dtype)
        return super().rotation(positions, frequencies, scale, dtype) if tables is None else tables

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = elementwise.rotary(x, cos, sin)
        return super().rotary(x, cos, sin) if out is None else out

    def take_rows(self, x: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
        out = None if scale == 1 else elementwise.take_rows(x, index, scale)  # without a scale, torch needs one kernel
        return super().take_rows(x, index, scale) if out is None else out

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
    ) -> None:
        if not rotate_store.covers(k, kv_cache):
            return super().write_kv(k, v, kv_cache, slot_mapping, scales)
        return rotate_store.write_kv(k, v, kv_cache, slot_mapping, scales)

    def rotate_and_store(self, new: NewHeads) -> Tensor:
        is_covered = rotate_store.covers(new.heads, new.kv_cache)
        return rotate_store.rotate_and_store(new) if is_covered else super().rotate_and_store(new)

    def attention_batch(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        slot_mapping: Tensor,
        *,
        block_size: int,
        prefix_spans: np.ndarray | None = None,
        there: DeviceRows | None = None,
    ) -> TritonBatch:
        recorder = self._recorder
        return TritonBatch(
            query_lens, seq_lens, block_tables, slot_mapping, block_size, prefix_spans, there,
            lambda: recorder.is_capturing,
        )  # fmt: skip

    def attention(self, q: Tensor, kv_cache: Tensor, batch: AttentionPlan, form: AttentionForm) -> Tensor:
        out = self._attend(q, kv_cache, batch, form)
        return super().attention(q, kv_cache, batch, form) if out is None else out

    def rotate_and_attend(self, new: NewHeads, batch: AttentionPlan, form: AttentionForm) -> Tensor:
        heads, kv_cache = new.heads, new.kv_cache
        if (
            not self._is_one_kernel
            or new.is_interleaved
            or not isinstance(batch, TritonBatch)
            or not rotate_store.covers(heads, kv_cache)
            or not covers_rotation(heads, kv_cache, batch.rows, form)
        ):
            return super().rotate_and_attend(new, batch, form)
        return self._attention_of(heads).rotate_and_attend(new, batch.rows, form)

    def partial_attention(
        self, q: Tensor, kv_cache: Tensor, batch: AttentionPlan, form: AttentionForm
    ) -> tuple[Tensor, Tensor]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = self._attend(q, kv_cache, batch, form, lse)
        return super().partial_attention(q, kv_cache, batch, form) if out is None else (out, lse)

    def merge_attention(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        out = selected_attention.merge(parts)
        return super().merge_attention(parts) if out is None else out

    def selected_attention(self, q: Tensor, kv_cache: Tensor, selection: Selection, *, scale: float) -> Tensor:
        out = selected_attention.attend_selected(q, kv_cache, selection, scale)
        return super().selected_attention(q, kv_cache, selection, scale=scale) if out is None else out

    def _attend(
        self, q: Tensor, kv_cache: Tensor, batch: AttentionPlan, form: AttentionForm, lse: Tensor | None = None
    ) -> Tensor | None:
        """The output of the kernels, or None if they do not compute this attention."""
        if form.pair_bias is not None or not isinstance(batch, TritonBatch):
            return None
        if not covers(q, kv_cache, batch.rows, form):
            return None
        return self._attention_of(q).attend(q, kv_cache, batch.rows, form, lse)

    def _attention_of(self, x: Tensor) -> Attention:
        """Attention on the device of `x`."""
        if self._attention is None:
            self._attention = Attention(x.device)
        return self._attention

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        return self._recorder.record(run)

    def route(self, x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
        return routing.route(x, router) if routing.covers(x, router) else super().route(x, router)

    def experts(self, packed: GroupedExperts, call: ExpertCall) -> Tensor:
        if not experts.covers(call.x, packed) or (call.low_rank is not None and not takes_adapters(packed)):
            return super().experts(packed, call)
        return experts.run(packed, call, self.activation_of_experts(packed, call.activation), self.add_low_rank)

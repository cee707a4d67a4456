"""The CPU backend with the C++ kernels of `kernels/`: checks tensors, and passes their pointers to the kernels.

A call that the kernels do not cover (another dtype, or a layout that is not dense) goes to `EagerBackend`, and is
logged once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.activations import Activation, PlainActivation
from quire.ops.backend import AttentionForm, Backend, DeviceRows, ModelNeeds, NewHeads
from quire.ops.cache_rows import largest_stored
from quire.ops.cpu import calls
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.attention_plan import NativePlan
from quire.ops.cpu.calls import ACTIVATIONS, CACHE_DTYPES, CHUNKS, DTYPES
from quire.ops.cpu.elementwise import PlainKernels
from quire.ops.cpu.experts import ExpertLinear, ExpertPanels, NativeExperts, PackedExperts
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.latent import NativeLatent
from quire.ops.cpu.launches import Launcher, Recording
from quire.ops.cpu.libraries import Kernels
from quire.ops.cpu.onednn import OneDnnWeight, has_kernel
from quire.ops.cpu.panels import PanelLinear, PanelWeight
from quire.ops.cpu.quantized_panels import Panels, QuantizedPanelLinear, QuantizedPanelWeight
from quire.ops.cpu.recurrent import NativeRecurrent
from quire.ops.cpu.residual_streams import NativeResidualStreams
from quire.ops.cpu.sampling import NativeSampling
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.quantized import QuantizedLayer
from quire.ops.eager.sequences import attend_sequences, batch_of_sequences
from quire.ops.experts import ExpertCall, ExpertWeights
from quire.ops.latent import Selection
from quire.ops.linear import LinearWeight, LowRankWeights
from quire.ops.quantized import QuantizedWeight
from quire.ops.recording import RecordingRules
from quire.ops.routing import ExpertRouter
from quire.ops.stored import StoredWeight

PackedWeight = PanelWeight | QuantizedPanelWeight | OneDnnWeight | QuantizedLayer

_MAX_GROUP = 64
"""The most query heads that share a KV head."""

_WORTH_OPENMP_SECONDS = 150e-6
"""A layer that oneDNN computes in less time on one thread stays on one thread. OpenMP's other threads sleep since the
last operation; waking them and waiting for them costs up to 50 µs, and more if another process uses their cores.
"""
_WORTH_TEAM_SECONDS = 10e-6
"""The same for our own kernels, which do not wait for late threads (threads.h)."""


class NativeBackend(Backend[NativePlan, PackedWeight, PackedExperts]):
    recording_rules = RecordingRules(drafts_as="sequences")

    def __init__(
        self,
        kernels: Kernels,
        eager: EagerBackend[OneDnnWeight],
        fallbacks: Fallbacks | None = None,
        bits: ActivationBits | None = None,
    ) -> None:
        """Takes the library as `kernels`, and `eager` for the calls that the kernels do not cover.

        `bits` chooses the precision of activations with integer weights; None: the best one with these kernels.
        """
        self._kernels = kernels
        self._eager = eager
        self.packed_types = (PanelWeight, QuantizedPanelWeight, ExpertPanels, ExpertLinear, *eager.packed_types)
        self._fallbacks = fallbacks = fallbacks or Fallbacks()
        self._launcher = launcher = Launcher(kernels)
        self._empty = launcher.empty
        self._panels = PanelLinear(kernels, launcher, fallbacks)
        quantized_panels = Panels(kernels, launcher)
        self._bits = bits = bits or ActivationBits(kernels)
        self._quantized = QuantizedPanelLinear(quantized_panels, launcher, bits)
        self._mixture = NativeExperts(quantized_panels, launcher, bits, eager, fallbacks)
        self._plain = PlainKernels(launcher, eager, fallbacks)
        self.recurrent = NativeRecurrent(launcher, eager.recurrent, fallbacks)
        self.sampling = NativeSampling(launcher, eager.sampling, fallbacks)
        self.latent = NativeLatent(launcher, eager.latent, fallbacks)
        self.residual_streams = NativeResidualStreams(launcher, eager.residual_streams, fallbacks)
        self._attention = launcher.bind(calls.ATTENTION)
        self._attention_of_codes = launcher.bind(calls.ATTENTION_OF_CODES)
        self._take_rows = launcher.bind(calls.TAKE_ROWS)
        self._rotation = launcher.bind(calls.ROTATION)
        self._rms_norm = launcher.bind(calls.RMS_NORM)
        self._add_rms_norm = launcher.bind(calls.ADD_RMS_NORM)
        self._rotary = launcher.bind(calls.ROTARY)
        self._activate_and_mul = launcher.bind(calls.ACTIVATE_AND_MUL)
        self._write_cache = launcher.bind(calls.WRITE_CACHE)
        self._rotate_and_store = launcher.bind(calls.ROTATE_AND_STORE)

    @property
    def layout(self) -> str:
        products = "bfloat16 products" if self._panels.has_kernel else "no bfloat16 products"
        return f"{self._kernels.level}, {products}, {self._eager.layout}"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() == 3 and x.stride(2) == 1 and weight.is_contiguous() and _are_numbers(x, weight):
            out = self._empty(*x.shape, dtype=x.dtype)
            tokens, heads, size = x.shape
            weight_stride = size if weight.dim() == 2 else 0
            if not self._rms_norm(
                x.data_ptr(), weight.data_ptr(), out.data_ptr(), tokens, heads, size, x.stride(0), x.stride(1),
                weight_stride, _dtype(x), _dtype(weight), torch.get_num_threads(), eps,
            ):  # fmt: skip
                return out
        elif x.dim() == 2 and weight.dim() == 1:
            return self.rms_norm(x.unsqueeze(1), weight, eps).squeeze(1)
        return self._fallbacks.run(self._eager.rms_norm, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dense = x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
        if dense and x.dim() == 2 and _same_dtype(x, residual) and _are_numbers(weight):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._add_rms_norm(
                x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, _dtype(x),
                _dtype(weight), torch.get_num_threads(), eps,
            ):  # fmt: skip
                return out, residual
        return self._fallbacks.run(self._eager.add_rms_norm, x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return self._plain.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._plain.add_layer_norm(x, residual, weight, bias, eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._plain.add(x, residual)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return self._plain.join(parts)

    def scale(self, x: Tensor, factor: float, softcap: float | None = None) -> Tensor:
        return self._plain.scale(x, factor, softcap)

    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        return self._plain.activate(x, activation)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous() and _same_dtype(x, cos, sin):
            out = self._empty(*x.shape, dtype=x.dtype)
            if not self._rotary(
                x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape, cos.shape[-1], x.stride(0),
                x.stride(1), _dtype(x), torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.rotary, x, cos, sin)

    def activate_and_mul(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        if x.dim() == 2 and x.stride(1) == 1 and x.dtype in DTYPES:
            tokens, size = x.shape[0], x.shape[1] // 2
            out = self._empty(tokens, size, dtype=x.dtype)
            if not self._activate_and_mul(
                x.data_ptr(), out.data_ptr(), tokens, size, x.stride(0), ACTIVATIONS[activation], _dtype(x),
                torch.get_num_threads(),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.activate_and_mul, x, activation)

    def take_rows(self, x: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
        if x.dim() == 2 and x.is_contiguous() and index.is_contiguous() and (scale == 1 or _are_numbers(x)):
            out = self._empty(len(index), x.shape[1], dtype=x.dtype)
            if not self._take_rows(
                x.data_ptr(), index.data_ptr(), out.data_ptr(), len(x), len(index), x.shape[1] * x.itemsize,
                DTYPES.get(x.dtype, 0), scale,
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.take_rows, x, index, scale)

    def rotation(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if positions.is_contiguous() and frequencies.is_contiguous() and dtype in DTYPES:
            num_tokens, half = len(positions), len(frequencies)
            cos, sin = (self._empty(num_tokens, 1, 2 * half, dtype=dtype) for _ in range(2))
            if not self._rotation(
                positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, half,
                DTYPES[dtype], torch.get_num_threads(), scale,
            ):  # fmt: skip
                return cos, sin
        return self._fallbacks.run(self._eager.rotation, positions, frequencies, scale, dtype)

    def pack_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedWeight:
        return self._pack(weight, bias, is_gated=False) or self._eager.pack_linear(weight, bias)

    def pack_gated_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedWeight:
        return self._pack(weight, bias, is_gated=True) or self._eager.pack_gated_linear(weight, bias)

    def _pack(self, weight: LinearWeight, bias: Tensor | None, *, is_gated: bool) -> PackedWeight | None:
        """`weight` for our own kernels; None if they do not take it, or oneDNN's are as fast."""
        if isinstance(weight, QuantizedWeight):
            self._fallbacks.has_quantized = True
            packed = self._quantized.pack(weight, bias, is_gated=is_gated)
            if packed is None:
                self._fallbacks.say_of_quantized(weight)
            return packed
        panels = self._panels.pack(weight, bias, is_gated=is_gated)
        if panels is not None:
            return panels
        is_fast = weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and self._quantized.is_fast)
        if (is_fast or not has_kernel(weight.dtype)) and (bias is None or bias.dtype == weight.dtype):
            return self._quantized.pack(weight, bias, is_gated=is_gated)
        return None

    def has_rows(self, packed: PackedWeight) -> bool:
        return isinstance(packed, (PanelWeight, QuantizedPanelWeight)) or self._eager.has_rows(packed)

    def take_packed_rows(self, packed: PackedWeight, index: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        if isinstance(packed, PanelWeight):
            return self._panels.take_rows(packed, index, scale).to(dtype)
        if isinstance(packed, QuantizedPanelWeight):
            return self._quantized.take_rows(packed, index, dtype, scale)
        return self._fallbacks.run(self._eager.take_packed_rows, packed, index, dtype, scale)

    def gated_linear(self, x: Tensor, packed: PackedWeight, activation: Activation = "silu") -> Tensor:
        if isinstance(packed, PanelWeight):
            return self._panels.multiply(x, packed, _team_size(x, packed.weight), activation)
        if isinstance(packed, QuantizedPanelWeight):
            return self._quantized.multiply(x, packed, _team_size(x, packed.panels), activation)
        return self.activate_and_mul(self.linear(x, packed), activation)

    def restore(self, stored: StoredWeight) -> Any:
        packed = super().restore(stored)
        layers = packed.layers if isinstance(packed, ExpertPanels) else [packed]
        for layer in layers:
            if isinstance(layer, (QuantizedPanelWeight, ExpertLinear)):
                self._bits.say(layer.codec, has_byte_inputs=layer.has_byte_inputs, is_dry=False)
        return packed

    def linear(self, x: Tensor, packed: PackedWeight, activation: PlainActivation | None = None) -> Tensor:
        if isinstance(packed, QuantizedPanelWeight):
            return self._quantized.multiply(x, packed, _team_size(x, packed.panels), activation)
        out = self._linear_alone(x, packed)
        return out if activation is None else self.activate(out, activation)

    def _linear_alone(self, x: Tensor, packed: PanelWeight | OneDnnWeight | QuantizedLayer) -> Tensor:
        if isinstance(packed, PanelWeight):
            return self._panels.multiply(x, packed, _team_size(x, packed.weight))
        if isinstance(packed, QuantizedLayer):
            return self._eager.linear(x, packed)
        num_threads, seconds = torch.get_num_threads(), _linear_seconds(len(x), packed.weight)
        if num_threads == 1 or seconds > _WORTH_OPENMP_SECONDS:
            return self._eager.linear(x, packed)
        torch.set_num_threads(1)
        try:
            return self._eager.linear(x, packed)
        finally:
            torch.set_num_threads(num_threads)

    def add_low_rank(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
        return self._plain.add_low_rank(x, out, weights, adapters)

    def gated_low_rank(
        self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        gated = self._plain.gated_low_rank(x, out, weights, adapters, activation)
        return (
            self.activate_and_mul(self.add_low_rank(x, out, weights, adapters), activation) if gated is None else gated
        )

    def route(self, x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
        return self._mixture.route(x, router)

    def pack_experts(self, experts: Iterable[ExpertWeights], num_experts: int) -> PackedExperts:
        return self._mixture.pack(experts, num_experts)

    def expert_tensors(self, packed: PackedExperts, index: int) -> list[Tensor]:
        return self._mixture.tensors(packed, index)

    def experts(self, packed: PackedExperts, call: ExpertCall) -> Tensor:
        return self._mixture.run(packed, call)

    def kv_cache_shape(
        self, num_pages: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        return self._eager.kv_cache_shape(num_pages, block_size, num_kv_heads, head_dim, dtype)

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
    ) -> None:
        if _is_cache(kv_cache) and k.stride(2) == v.stride(2) == 1 and _same_dtype(k, v):
            slots = slot_mapping.contiguous()
            if not self._write_cache(
                k.data_ptr(), v.data_ptr(), kv_cache.data_ptr(), slots.data_ptr(), _pointer(scales), *k.shape,
                k.stride(0), k.stride(1), v.stride(0), v.stride(1), kv_cache.stride(0), kv_cache.shape[3], _dtype(k),
                CACHE_DTYPES[kv_cache.dtype], torch.get_num_threads(), largest_stored(kv_cache.dtype),
            ):  # fmt: skip
                return
        self._fallbacks.run(self._eager.write_kv, k, v, kv_cache, slot_mapping, scales)

    def read_kv(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._eager.read_kv(kv_cache, slots)

    def rotate_and_store(self, new: NewHeads) -> Tensor:
        heads, cos, sin, kv_cache = new.heads, new.cos, new.sin, new.kv_cache
        num_tokens, num_all, head_dim = heads.shape
        num_kv_heads, block_size = kv_cache.shape[2:4]
        weight, eps = new.norm or (None, 0.0)
        dense = heads.stride(2) == 1 and heads.stride(1) == head_dim and cos.is_contiguous() and sin.is_contiguous()
        if weight is not None:
            dense = dense and weight.is_contiguous() and _are_numbers(weight)
        if dense and _is_cache(kv_cache) and _same_dtype(heads, cos, sin):
            num_heads, slots = num_all - 2 * num_kv_heads, new.slot_mapping.contiguous()
            out = self._empty(num_tokens, num_heads, head_dim, dtype=heads.dtype)
            if not self._rotate_and_store(
                heads.data_ptr(), 0 if weight is None else weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                out.data_ptr(), kv_cache.data_ptr(), slots.data_ptr(), _pointer(new.scales), num_tokens, num_heads,
                num_kv_heads, head_dim, cos.shape[-1], heads.stride(0), kv_cache.stride(0), block_size,
                new.is_interleaved, _dtype(heads), _dtype(heads if weight is None else weight),
                CACHE_DTYPES[kv_cache.dtype], torch.get_num_threads(), eps, largest_stored(kv_cache.dtype),
            ):  # fmt: skip
                return out
        return self._fallbacks.run(self._eager.rotate_and_store, new)

    def prepare(self, needs: ModelNeeds) -> None:
        wanted = {
            "codes": not DTYPES.keys() >= set(needs.cache_dtypes),
            "latent": needs.has_latents,
            "recurrent": needs.has_states,
            "low_rank": needs.has_adapters,
        }
        for part, is_wanted in wanted.items():
            if is_wanted:
                self._kernels.part(part)

    def scratch_bytes(self, device: torch.device, row_bytes: int, *, is_quantized: bool) -> int:
        """Counts only fallbacks, because kernels read pages in place. A form without a kernel gathers a row's pages at
        a time.
        """
        return row_bytes

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
    ) -> NativePlan:
        return NativePlan(query_lens, seq_lens, block_tables, slot_mapping, block_size, prefix_spans)

    def attention(self, q: Tensor, kv_cache: Tensor, batch: NativePlan, form: AttentionForm) -> Tensor:
        out = self._attend(q, kv_cache, batch, form, None)
        return self._fallbacks.run(self._eager.attention, q, kv_cache, batch, form) if out is None else out

    def sequence_batch(self, lengths: np.ndarray, device: torch.device) -> NativePlan:
        return batch_of_sequences(self, lengths, device)

    def sequence_attention(
        self,
        heads: Tensor,
        num_kv_heads: int,
        batch: NativePlan,
        form: AttentionForm,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        return attend_sequences(self, heads, num_kv_heads, batch, form, rotation, norm, self._empty)

    def selected_attention(self, q: Tensor, kv_cache: Tensor, selection: Selection, *, scale: float) -> Tensor:
        return self._eager.selected_attention(q, kv_cache, selection, scale=scale)

    def partial_attention(
        self, q: Tensor, kv_cache: Tensor, batch: NativePlan, form: AttentionForm
    ) -> tuple[Tensor, Tensor]:
        lse = self._empty(*q.shape[:2], dtype=torch.float32)
        out = self._attend(q, kv_cache, batch, form, lse)
        if out is None:
            return self._fallbacks.run(self._eager.partial_attention, q, kv_cache, batch, form)
        return out, lse

    def merge_attention(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return self._plain.merge_attention(parts)

    def _attend(
        self, q: Tensor, kv_cache: Tensor, batch: NativePlan, form: AttentionForm, lse: Tensor | None
    ) -> Tensor | None:
        """Returns the outputs, and fills `lse` with log-sum-exps if given; None without a kernel for the inputs."""
        num_tokens, num_heads, head_dim = q.shape
        _, _, num_kv_heads, block_size, row_size = kv_cache.shape
        group = num_heads // num_kv_heads
        spans = batch.prefix_spans if batch.meets_prefix else None
        if form.pair_bias is not None or (spans is not None and form.chunk is not None):
            return None  # plain torch computes the former, and raises the error of the latter
        if group <= _MAX_GROUP and _is_cache(kv_cache) and q.stride(2) == 1 and q.dtype in DTYPES:
            out = self._empty(num_tokens, num_heads, head_dim, dtype=q.dtype)
            reach = 0 if form.distance_bias is None else form.distance_bias.shape[1] // 2
            self._launcher.keep(batch)
            attention = self._attention if kv_cache.dtype in DTYPES else self._attention_of_codes
            if not attention(
                q.data_ptr(), out.data_ptr(), kv_cache.data_ptr(), batch.query_lens.ctypes.data,
                batch.seq_lens.ctypes.data, batch.block_tables.ctypes.data,
                0 if spans is None else spans.ctypes.data, _pointer(form.sinks), _pointer(form.slopes),
                _pointer(form.distance_bias), _pointer(lse), q.stride(0), q.stride(1), len(batch.query_lens),
                batch.block_tables.shape[1], kv_cache.stride(0), block_size, num_kv_heads, group, head_dim, row_size,
                form.window or 0, form.chunk or 0, form.span_window or 0, CHUNKS[form.chunks], reach, _dtype(q),
                CACHE_DTYPES[kv_cache.dtype], torch.get_num_threads(), form.scale, form.softcap or 0.0,
            ):  # fmt: skip
                return out
        return None

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        return self._launcher.record(run)


def _linear_seconds(num_tokens: int, weight: Tensor) -> float:
    """Estimated time of a linear layer on one thread of a current server: 400 GFLOP/s, and 20 GB/s from memory."""
    return max(2 * num_tokens * weight.numel() / 400e9, weight.numel() * weight.element_size() / 20e9)


def _team_size(x: Tensor, panels: Tensor) -> int:
    """Number of threads on which our own kernels multiply `x` by packed weights."""
    return 1 if _linear_seconds(len(x), panels) <= _WORTH_TEAM_SECONDS else torch.get_num_threads()


def _dtype(x: Tensor) -> int:
    return DTYPES[x.dtype]


def _are_numbers(*tensors: Tensor) -> bool:
    return all(x.dtype in DTYPES for x in tensors)


def _same_dtype(x: Tensor, *others: Tensor) -> bool:
    return x.dtype in DTYPES and all(other.dtype == x.dtype for other in others)


def _is_cache(kv_cache: Tensor) -> bool:
    """Returns True if the kernels cover the cache: its pages are dense, and its dtype has kernels."""
    return kv_cache.dtype in CACHE_DTYPES and (kv_cache.is_contiguous() or kv_cache[0].is_contiguous())


def _pointer(numbers: Tensor | None) -> int:
    """Returns the address of a dense float32 tensor, or null.

    Raises:
        TypeError: another dtype or layout.
    """
    if numbers is None:
        return 0
    if numbers.dtype != torch.float32 or not numbers.is_contiguous():
        raise TypeError(f"attention takes dense float32 numbers beside its rows, got {numbers.dtype}")
    return numbers.data_ptr()

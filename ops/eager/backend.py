"""The operations in plain torch: they run on every device, and other backends are tested against them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activations import SILU_LIMIT, SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, PlainActivation
from quire.ops.backend import AttentionForm, Backend, DeviceRows, ModelNeeds, NewHeads
from quire.ops.cache_pages import ScaledRows
from quire.ops.cache_rows import decode, encode, in_octets, largest_stored, plain_dtype, row_size
from quire.ops.eager import attention_plan
from quire.ops.eager.attention import attend, attend_partly, merge
from quire.ops.eager.attention_plan import AttentionPlan
from quire.ops.eager.experts import GroupedExperts, GroupedLinear, pack, run, tensors
from quire.ops.eager.latent import EagerLatent
from quire.ops.eager.linear import LinearLayers
from quire.ops.eager.low_rank import add_low_rank
from quire.ops.eager.quantized import DequantizedLinear, QuantizedLayer
from quire.ops.eager.recurrent import EagerRecurrent
from quire.ops.eager.residual_streams import EagerResidualStreams
from quire.ops.eager.routing import route
from quire.ops.eager.sampling import EagerSampling
from quire.ops.eager.selection import attend_tokens
from quire.ops.eager.sequences import attend_sequences, batch_of_sequences
from quire.ops.experts import ExpertCall, ExpertWeights
from quire.ops.latent import Selection
from quire.ops.linear import LinearWeight, LowRankWeights, PackedLinear
from quire.ops.quantized import QuantizedWeight, dequantize
from quire.ops.recording import Recording
from quire.ops.routing import ExpertRouter

_ACTIVATIONS: dict[PlainActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
    "quick_gelu": lambda x: (1.702 * x).sigmoid_().mul_(x),
}


class EagerBackend(Backend[AttentionPlan, PackedLinear | QuantizedLayer, GroupedExperts], Generic[PackedLinear]):
    """Plain torch. A layer's KV cache is [num_pages, 2, num_kv_heads, block_size, head_dim]: keys, then values."""

    def __init__(
        self,
        linear_layers: LinearLayers[PackedLinear],
        quantized: DequantizedLinear[PackedLinear] | None = None,
        pages: ScaledRows = ScaledRows(),
    ) -> None:
        """`pages` says where the scales of a quantized cache lie."""
        self._linear_layers = linear_layers
        self._quantized = quantized or DequantizedLinear(linear_layers)
        self._pages = pages
        own_types = (QuantizedLayer, QuantizedWeight, GroupedExperts, GroupedLinear)
        self.packed_types = (*own_types, *linear_layers.packed_types)
        self.latent = EagerLatent(self.rms_norm, self.rotary)
        self.recurrent = EagerRecurrent()
        self.sampling = EagerSampling()
        self.residual_streams = EagerResidualStreams()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.is_cuda and weight.dtype in (x.dtype, torch.float32):  # the same roundings, in a quarter of the kernels
            return (F.rms_norm(x.to(weight.dtype), x.shape[-1:], eps=eps) * weight).to(x.dtype)
        # The mean is float32. vector_norm is one pass over x; the operations after it work on one number a row.
        full = x.float()
        norm = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
        inverse = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return ((full * inverse).to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        full = x.float()
        centred = full - full.mean(dim=-1, keepdim=True)
        out = centred * (centred.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        if weight is not None:
            out = out * weight
        return (out if bias is None else out + bias).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = self.add(x, residual)
        return self.layer_norm(total, weight, bias, eps), total

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)

    def scale(self, x: Tensor, factor: float, softcap: float | None = None) -> Tensor:
        if softcap is None:
            return x.mul_(factor)
        return x.copy_((x.float() * (factor / softcap)).tanh_() * softcap)

    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        return _ACTIVATIONS[activation](x)

    def rotation(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        if size < x.shape[-1]:
            return torch.cat((self.rotary(x[..., :size], cos, sin), x[..., size:]), dim=-1)
        swapped = torch.cat((x[..., size // 2 :], x[..., : size // 2]), dim=-1)
        return torch.addcmul(x * cos, swapped, sin)

    def activate_and_mul(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * (gate * SWIGLU_ALPHA).sigmoid_() * (up + 1)
        if activation == "clamped_silu":
            return F.silu(gate.clamp(max=SILU_LIMIT)).mul_(up.clamp(-SILU_LIMIT, SILU_LIMIT))
        return _ACTIVATIONS[activation](gate).mul_(up)

    def take_rows(self, x: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
        rows = F.embedding(index, x)
        return rows if scale == 1 else rows.mul_(scale)

    @overload
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear: ...
    @overload
    def pack_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear | QuantizedLayer: ...
    def pack_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear | QuantizedLayer:
        if isinstance(weight, QuantizedWeight):
            return self._quantized.pack(weight.checked(), bias)
        return self._linear_layers.pack(weight, bias)

    def has_rows(self, packed: PackedLinear | QuantizedLayer) -> bool:
        return isinstance(packed, QuantizedLayer) or self._linear_layers.plain(packed) is not None

    def take_packed_rows(
        self, packed: PackedLinear | QuantizedLayer, index: Tensor, dtype: torch.dtype, scale: float = 1.0
    ) -> Tensor:
        if isinstance(packed, QuantizedLayer):
            rows = dequantize(packed.weight.rows(index), dtype)
            return rows if scale == 1 else rows.mul_(scale)
        weight = self._linear_layers.plain(packed)
        assert weight is not None, "see has_rows"
        return self.take_rows(weight.to(dtype), index, scale)

    @property
    def layout(self) -> str:
        return self._linear_layers.layout

    def linear(
        self, x: Tensor, packed: PackedLinear | QuantizedLayer, activation: PlainActivation | None = None
    ) -> Tensor:
        if isinstance(packed, QuantizedLayer):
            out = self._quantized.multiply(x, packed)
        else:
            out = self._linear_layers.multiply(x, packed)
        return out if activation is None else self.activate(out, activation)

    @overload
    def pack_gated_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear: ...
    @overload
    def pack_gated_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear | QuantizedLayer: ...
    def pack_gated_linear(self, weight: LinearWeight, bias: Tensor | None = None) -> PackedLinear | QuantizedLayer:
        return self.pack_linear(weight, bias)

    def gated_linear(self, x: Tensor, packed: PackedLinear | QuantizedLayer, activation: Activation = "silu") -> Tensor:
        return self.activate_and_mul(self.linear(x, packed), activation)

    def add_low_rank(self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor) -> Tensor:
        return add_low_rank(x, out, weights, adapters)

    def gated_low_rank(
        self, x: Tensor, out: Tensor, weights: LowRankWeights, adapters: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        return self.activate_and_mul(self.add_low_rank(x, out, weights, adapters), activation)

    def route(self, x: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
        return route(x, router)

    def pack_experts(self, experts: Iterable[ExpertWeights], num_experts: int) -> GroupedExperts:
        return pack(experts, num_experts)

    def expert_tensors(self, packed: GroupedExperts, index: int) -> list[Tensor]:
        return tensors(packed, index)

    def experts(self, packed: GroupedExperts, call: ExpertCall) -> Tensor:
        return run(packed, call, self.activation_of_experts(packed, call.activation))

    def activation_of_experts(self, packed: GroupedExperts, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Returns what follows the first layer of experts."""
        if packed.is_gated:
            return partial(self.activate_and_mul, activation=activation)
        assert activation in _ACTIVATIONS, "an activation that has gates, for experts without them"
        return partial(self.activate, activation=activation)

    def kv_cache_shape(
        self, num_pages: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, ...]:
        return (num_pages, 2, num_kv_heads, block_size, row_size(head_dim, dtype))

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scales: Tensor | None = None
    ) -> None:
        block_size = kv_cache.shape[3]
        pages, offsets = slot_mapping // block_size, slot_mapping % block_size
        largest = largest_stored(kv_cache.dtype)
        of_keys, of_values = (None, None) if scales is None else scales.unsqueeze(-1)
        for cache, new, fixed in zip(in_octets(kv_cache).unbind(1), (k, v), (of_keys, of_values), strict=True):
            rows = encode(new.nan_to_num(0.0, largest, -largest), kv_cache.dtype, fixed)
            self._pages.write(cache, pages, offsets, in_octets(rows))

    def read_kv(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        block_size = kv_cache.shape[3]
        pages, offsets = slots // block_size, slots % block_size
        rows = (self._pages.read(cache, pages, offsets) for cache in in_octets(kv_cache).unbind(1))
        keys, values = (decode(each.view(kv_cache.dtype), plain_dtype(kv_cache.dtype)) for each in rows)
        return keys, values

    def rotate_and_store(self, new: NewHeads) -> Tensor:
        num_kv_heads = new.kv_cache.shape[2]
        num_heads = new.heads.shape[1] - 2 * num_kv_heads
        qk, v = new.heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if new.norm is not None:
            qk = self.rms_norm(qk, *new.norm)
        if new.is_interleaved:
            turned, rest = qk.tensor_split((new.cos.shape[-1],), dim=-1)
            qk = torch.cat((turned[..., ::2], turned[..., 1::2], rest), dim=-1)
        q, k = self.rotary(qk, new.cos, new.sin).split((num_heads, num_kv_heads), dim=1)
        self.write_kv(k, v, new.kv_cache, new.slot_mapping, new.scales)
        return q

    def prepare(self, needs: ModelNeeds) -> None:
        """Torch has all operations."""

    def scratch_bytes(self, device: torch.device, row_bytes: int, *, is_quantized: bool) -> int:
        return attention_plan.scratch_bytes(device, row_bytes, is_quantized=is_quantized)

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
    ) -> AttentionPlan:
        return AttentionPlan(query_lens, seq_lens, block_tables, slot_mapping, block_size, prefix_spans)

    def attention(self, q: Tensor, kv_cache: Tensor, batch: AttentionPlan, form: AttentionForm) -> Tensor:
        return attend(q, kv_cache, batch, form, pages=self._pages)

    def sequence_batch(self, lengths: np.ndarray, device: torch.device) -> AttentionPlan:
        return batch_of_sequences(self, lengths, device)

    def sequence_attention(
        self,
        heads: Tensor,
        num_kv_heads: int,
        batch: AttentionPlan,
        form: AttentionForm,
        *,
        rotation: tuple[Tensor, Tensor] | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        return attend_sequences(self, heads, num_kv_heads, batch, form, rotation, norm)

    def selected_attention(self, q: Tensor, kv_cache: Tensor, selection: Selection, *, scale: float) -> Tensor:
        return attend_tokens(q, kv_cache, self.read_kv, selection, scale)

    def partial_attention(
        self, q: Tensor, kv_cache: Tensor, batch: AttentionPlan, form: AttentionForm
    ) -> tuple[Tensor, Tensor]:
        return attend_partly(q, kv_cache, batch, form, self._pages)

    def merge_attention(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return merge(parts)

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Recording | None]:
        return run(), None  # plain torch has no list of launches to record

"""Linear layers on oneDNN, where `panels.py` has none. A weight is put into its layout once, not at every call."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.eager import silu_and_mul


@dataclass(frozen=True)
class PackedWeight:
    """A weight in oneDNN's layout, or as it came where oneDNN has no kernel for its dtype on this CPU."""

    weight: Tensor
    bias: Tensor | None
    is_blocked: bool


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Packs `weight` [out, in]."""
    if _has_kernel(weight.dtype):
        return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight), bias, is_blocked=True)
    return PackedWeight(weight, bias, is_blocked=False)


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """`x @ weight.T + bias`; a row's result does not depend on how many rows there are."""
    if packed.is_blocked:
        return torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return F.linear(x, packed.weight, packed.bias)


pack_gated_linear = pack_linear


def gated_linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """`silu(gate) * up` of [gate | up] = `x @ weight.T + bias`."""
    return silu_and_mul(linear(x, packed))


def linear_seconds(num_tokens: int, weight: Tensor) -> float:
    """About what `linear` takes on one thread of a current server: at 400 GFLOP/s, and at 20 GB/s from memory."""
    return max(2 * num_tokens * weight.numel() / 400e9, weight.numel() * weight.element_size() / 20e9)


def _has_kernel(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32

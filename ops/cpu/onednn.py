"""Linear layers on oneDNN, for weights that `panels.py` does not pack. Weights are reordered to its layout once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.cpu.fallbacks import Fallbacks

_NO_KERNEL = (
    "oneDNN has no kernel for %s on this processor: --dtype float32 or --quantization int8 is faster with long prompts."
)


@dataclass(frozen=True)
class OneDnnWeight:
    """A weight in oneDNN's layout, or unchanged if oneDNN has no kernel for its dtype on this CPU."""

    weight: Tensor
    bias: Tensor | None
    is_blocked: bool


class OneDnnLinear:
    def __init__(self, fallbacks: Fallbacks | None = None) -> None:
        self._fallbacks = fallbacks or Fallbacks()

    packed_types: tuple[type, ...] = (OneDnnWeight,)

    @property
    def layout(self) -> str:
        types = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if has_kernel(dtype)]
        return " ".join(["oneDNN", *(str(dtype).removeprefix("torch.") for dtype in types)])

    def pack(self, weight: Tensor, bias: Tensor | None) -> OneDnnWeight:
        if has_kernel(weight.dtype):
            return OneDnnWeight(_blocked(weight), bias, is_blocked=True)
        self._fallbacks.say(_NO_KERNEL % str(weight.dtype).removeprefix("torch."))
        return OneDnnWeight(weight, bias, is_blocked=False)

    def multiply(self, x: Tensor, packed: OneDnnWeight) -> Tensor:
        if packed.is_blocked:
            return torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
        return F.linear(x, packed.weight, packed.bias)

    def plain(self, packed: OneDnnWeight) -> Tensor | None:
        return None if packed.is_blocked else packed.weight


def _blocked(weight: Tensor) -> Tensor:
    if weight.is_meta:
        return weight.new_empty(weight.shape)
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def has_kernel(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies by weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32

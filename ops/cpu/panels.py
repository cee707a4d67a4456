"""Linear layers in bfloat16 with the kernel of `kernels/linear.cpp`, on processors with AVX512-BF16 or AMX."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.cpu import calls
from quire.ops.cpu.calls import ACTIVATIONS
from quire.ops.cpu.fallbacks import Fallbacks
from quire.ops.cpu.launches import Launcher

_NO_PERMISSION = (
    "Linear layers in bfloat16 are computed in float32, which is slower: the system does not let this process use the "
    "processor's AMX registers (arch_prctl; Linux before 5.16, or a container that forbids it)."
)
_OTHER_BIAS = "A linear layer in bfloat16 is left to oneDNN, because its bias is %s."


@dataclass(frozen=True)
class PanelWeight:
    """A weight [out, in] in panels of 32 outputs, or of 16 gates and their 16 ups if it is gated; its bias [out]."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    is_gated: bool


class PanelLinear:
    """Packs weights and multiplies by them; a row's result has the same bits in any batch."""

    def __init__(self, kernels: ctypes.CDLL, launcher: Launcher, fallbacks: Fallbacks) -> None:
        """`kernels` comes from `quire.ops.cpu.libraries`; `launcher` launches them."""
        self._fallbacks = fallbacks
        self._size = kernels["quire_panels_size"]
        self._size.argtypes = [ctypes.c_long] * 3
        self._size.restype = ctypes.c_long
        self._pack = launcher.bind(calls.PACK_PANELS)
        self._linear = launcher.bind(calls.LINEAR)
        self._take_rows = launcher.bind(calls.TAKE_PANEL_ROWS)
        self._empty = launcher.empty

    @property
    def has_kernel(self) -> bool:
        """True if this process may multiply by panels."""
        return self._size(1, 1, False) > 0

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False) -> PanelWeight | None:
        """Packs `weight` [out, in] in panels; None if the kernel does not cover its dtype or this processor.

        If a missing permission or the bias is the reason, that is logged once.
        """
        if weight.dtype != torch.bfloat16:
            return None
        out_features, in_features = weight.shape
        size = self._size(out_features, in_features, is_gated)
        if size <= 0:
            if size < 0:
                self._fallbacks.say(_NO_PERMISSION)
            return None
        if bias is not None and bias.dtype != torch.bfloat16:
            self._fallbacks.say(_OTHER_BIAS % str(bias.dtype).removeprefix("torch."))
            return None
        weight = weight.contiguous()
        panels = weight.new_empty(size)
        if not weight.is_meta:
            self._pack(
                weight.data_ptr(), panels.data_ptr(), out_features, in_features, in_features, is_gated,
                torch.get_num_threads(),
            )  # fmt: skip
        return PanelWeight(panels, None if bias is None else bias.contiguous(), out_features, in_features, is_gated)

    def multiply(self, x: Tensor, packed: PanelWeight, num_threads: int, activation: Activation = "silu") -> Tensor:
        """`x @ weight.T + bias` for `x` [num_tokens, in]; if the weight is gated, `activate_and_mul` of the product.

        Raises:
            ValueError: `x` has another dtype or shape.
        """
        if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != packed.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; this layer takes bfloat16 [*, {packed.in_features}].")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = self._empty(len(x), packed.out_features // (2 if packed.is_gated else 1), dtype=torch.bfloat16)
        if self._linear(
            x.data_ptr(), packed.weight.data_ptr(), 0 if packed.bias is None else packed.bias.data_ptr(),
            out.data_ptr(), len(x), x.stride(0), packed.in_features, packed.out_features, packed.is_gated,
            ACTIVATIONS[activation], num_threads,
        ):  # fmt: skip
            raise MemoryError(f"no memory to multiply {list(x.shape)} by {packed.out_features} outputs")
        return out

    def take_rows(self, packed: PanelWeight, index: Tensor, scale: float) -> Tensor:
        """Looks up rows in bfloat16 of a weight that is not gated, as `Backend.take_packed_rows`.

        Raises:
            IndexError: an index is out of range.
        """
        index = index.contiguous()
        out = self._empty(len(index), packed.in_features, dtype=torch.bfloat16)
        if self._take_rows(
            packed.weight.data_ptr(), index.data_ptr(), out.data_ptr(), len(index), packed.out_features,
            packed.in_features, torch.get_num_threads(), scale,
        ):  # fmt: skip
            raise IndexError(f"rows {index.tolist()} of a weight with {packed.out_features}")
        return out

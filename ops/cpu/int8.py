"""Linear layers with weights of one byte each, with the kernel of `kernels/int8_linear.cpp`."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.backend import Int8Weight
from quire.ops.cpu import calls
from quire.ops.cpu.calls import DTYPES
from quire.ops.cpu.launches import Launcher


@dataclass(frozen=True)
class Int8Panels:
    """An `Int8Weight` whose values lie in the kernel's panels, and its bias [out]."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    in_features: int


class Int8Linear:
    """Packs weights and multiplies by them; a row's result is the same to the bit in any batch."""

    def __init__(self, kernels: ctypes.CDLL, launcher: Launcher) -> None:
        """`kernels` comes from `quire.ops.cpu.compiler`, `launcher` is theirs."""
        self._size = kernels["quire_int8_panels_size"]
        self._size.argtypes = [ctypes.c_long] * 2
        self._size.restype = ctypes.c_long
        self._pack = launcher.bind(calls.PACK_INT8_PANELS)
        self._linear = launcher.bind(calls.INT8_LINEAR)
        self._empty = launcher.empty

    def pack(self, weight: Int8Weight, bias: Tensor | None) -> Int8Panels:
        """`weight` in panels."""
        out_features, in_features = weight.shape
        values = weight.values.contiguous()
        panels = values.new_empty(self._size(out_features, in_features))
        if not values.is_meta:
            self._pack(values.data_ptr(), panels.data_ptr(), out_features, in_features, torch.get_num_threads())
        return Int8Panels(panels, weight.scales, bias, in_features)

    def multiply(self, x: Tensor, packed: Int8Panels, num_threads: int) -> Tensor:
        """`x @ weight.T + bias` for `x` [num_tokens, in] of any float type, which is the bias's too.

        Raises:
            ValueError: `x` has another dtype or shape.
        """
        bias = packed.bias
        if x.dtype not in DTYPES or x.dim() != 2 or x.shape[1] != packed.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; this layer takes floats [*, {packed.in_features}].")
        if bias is not None and bias.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype}, and the layer's bias {bias.dtype}.")
        if x.stride(1) != 1:
            x = x.contiguous()
        out_features = len(packed.scales)
        out = self._empty(len(x), out_features, dtype=x.dtype)
        failed = self._linear(
            x.data_ptr(), packed.weight.data_ptr(), packed.scales.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), len(x), x.stride(0), packed.in_features, out_features, DTYPES[x.dtype], num_threads,
        )  # fmt: skip
        if failed == 2:
            raise MemoryError(f"no memory to multiply {list(x.shape)} by {out_features} outputs")
        if failed:  # a processor that cannot convert float16
            wider = Int8Panels(packed.weight, packed.scales, None if bias is None else bias.float(), packed.in_features)
            return self.multiply(x.float(), wider, num_threads).to(x.dtype)
        return out

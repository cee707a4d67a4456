"""Linear layers whose weights are dequantized to float32 in registers, by `kernels/quantized_linear.cpp`."""

import ctypes
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.cpu import calls
from quire.ops.cpu.activation_bits import ActivationBits
from quire.ops.cpu.calls import ACTIVATIONS, DTYPES, NO_ACTIVATION
from quire.ops.cpu.codecs import Coded, encode
from quire.ops.cpu.launches import Launcher
from quire.ops.linear import LinearWeight


@dataclass(frozen=True)
class QuantizedPanelWeight:
    """A weight in the kernel's panels, with the other arguments of its call.

    Attributes:
        panels: [bytes] uint8: codes, scales and offsets.
        table: as in `Coded`, like `order`.
        bias: [out].
        form: `WeightForm` in `kernels/kernels.h`.
        shape: (out, in).
        codec: one of `CodecNumber` in `kernels/codecs.h`.
        has_byte_inputs: as in `QuantizedWeight`.
    """

    panels: Tensor
    table: Tensor | None
    order: Tensor | None
    bias: Tensor | None
    form: tuple[int, ...]
    shape: tuple[int, int]
    codec: int
    is_gated: bool
    has_byte_inputs: bool


class Encoded(NamedTuple):
    """A weight for the kernels, its form, and its size in panels."""

    coded: Coded
    form: tuple[int, ...]
    num_bytes: int


class Panels:
    """Packs weights into the kernels' panels.

    Attributes:
        is_fast: the kernels are built for vectors of at least eight elements, and for fused products and sums.
    """

    def __init__(self, kernels: ctypes.CDLL, launcher: Launcher) -> None:
        """`kernels` comes from `quire.ops.cpu.libraries`, `launcher` is theirs."""
        self._size = kernels["quire_quantized_size"]
        self._size.argtypes = [ctypes.c_char_p]
        self._size.restype = ctypes.c_long
        self._pack = launcher.bind(calls.PACK_QUANTIZED)
        self.is_fast = bool(kernels["quire_has_fused_vectors"]())

    def _bytes(self, form: tuple[int, ...]) -> int:
        """Bytes of a packed weight; 0 if the kernels do not take it."""
        return self._size(calls.PACK_QUANTIZED.layout.pack(0, 0, 0, 0, *form, 0, 0))

    def form(self, coded: Coded, *, is_gated: bool) -> tuple[int, ...]:
        """`WeightForm` in `kernels/kernels.h`."""
        has_offsets = coded.offsets is not None
        return (*coded.shape, coded.group, coded.codec, DTYPES[coded.scale_dtype], has_offsets, is_gated)

    def encode(self, weight: LinearWeight, *, is_gated: bool) -> Encoded | None:
        """Prepares `weight` for the kernels; None if the kernels do not take it."""
        coded = encode(weight)
        if coded is None:
            return None
        size = self._bytes(self.form(coded, is_gated=is_gated))
        if not size and coded.scale_dtype == torch.float16:  # a processor that cannot convert float16
            coded = coded.with_wide_scales()
            size = self._bytes(self.form(coded, is_gated=is_gated))
        return Encoded(coded, self.form(coded, is_gated=is_gated), size) if size else None

    def pack(self, coded: Coded, form: tuple[int, ...], panels: Tensor) -> None:
        """Writes `coded` to `panels`, unless these are on torch's meta device."""
        if not panels.is_meta:
            self._pack(
                coded.codes.data_ptr(), address(coded.scales), address(coded.offsets), panels.data_ptr(), *form,
                coded.flip, torch.get_num_threads(),
            )  # fmt: skip


class QuantizedPanelLinear:
    """Packs weights and multiplies by them; a row's result has the same bits in any batch.

    Attributes:
        is_fast: as in `Panels`: products in float32 take no longer than oneDNN's.
    """

    def __init__(self, panels: Panels, launcher: Launcher, bits: ActivationBits) -> None:
        """Takes `bits`, which choose the precision of `x` with integer weights."""
        self._panels = panels
        self._bits = bits
        self.is_fast = panels.is_fast
        self._linear = launcher.bind(calls.QUANTIZED_LINEAR)
        self._take_rows = launcher.bind(calls.TAKE_QUANTIZED_ROWS)
        self._empty = launcher.empty

    def pack(self, weight: LinearWeight, bias: Tensor | None, *, is_gated: bool = False) -> QuantizedPanelWeight | None:
        """Packs `weight` in panels; None if the kernel does not take it."""
        encoded = self._panels.encode(weight, is_gated=is_gated)
        if encoded is None:
            return None
        coded, form, size = encoded
        panels = coded.codes.new_empty(size, dtype=torch.uint8)
        self._panels.pack(coded, form, panels)
        bias = None if bias is None else bias.contiguous()
        self._bits.say(coded.codec, has_byte_inputs=coded.has_byte_inputs, is_dry=panels.is_meta)
        return QuantizedPanelWeight(
            panels, coded.table, coded.order, bias, form, coded.shape, coded.codec, is_gated, coded.has_byte_inputs
        )

    def multiply(
        self, x: Tensor, packed: QuantizedPanelWeight, num_threads: int, activation: Activation | None
    ) -> Tensor:
        """Computes `x @ weight.T + bias` for `x` [num_tokens, in] of any float type, which is also the bias's.

        With an `activation`, which a gated weight needs, returns `activate` of the product, or `activate_and_mul`.

        Raises:
            ValueError: `x` has another dtype or shape.
        """
        bias, (out_features, in_features) = packed.bias, packed.shape
        if x.dtype not in DTYPES or x.dim() != 2 or x.shape[1] != in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; this layer takes floats [*, {in_features}].")
        if bias is not None and bias.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype}, and the layer's bias {bias.dtype}.")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = self._empty(len(x), out_features // (2 if packed.is_gated else 1), dtype=x.dtype)
        activated = NO_ACTIVATION if activation is None else ACTIVATIONS[activation]
        failed = self._linear(
            x.data_ptr(), packed.panels.data_ptr(), address(packed.table), address(packed.order), address(bias),
            out.data_ptr(), len(x), x.stride(0), *packed.form, activated, DTYPES[x.dtype],
            self._bits.of(x.dtype, packed.codec, has_byte_inputs=packed.has_byte_inputs), num_threads,
        )  # fmt: skip
        if failed == 2:
            raise MemoryError(f"no memory to multiply {list(x.shape)} by {out_features} outputs")
        if failed:  # a processor that cannot convert float16
            wider = replace(packed, bias=None if bias is None else bias.float())
            return self.multiply(x.float(), wider, num_threads, activation).to(x.dtype)
        return out

    def take_rows(self, packed: QuantizedPanelWeight, index: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        """Looks up rows of a weight that is not gated, as `Backend.take_packed_rows`.

        Raises:
            IndexError: an index is out of range.
        """
        index = index.contiguous()
        out = self._empty(len(index), packed.shape[1], dtype=dtype)
        failed = self._take_rows(
            packed.panels.data_ptr(), address(packed.table), address(packed.order), index.data_ptr(), out.data_ptr(),
            len(index), *packed.form, DTYPES[dtype], torch.get_num_threads(), scale,
        )  # fmt: skip
        if failed == 2:
            raise IndexError(f"rows {index.tolist()} of a weight with {packed.shape[0]}")
        if failed:  # a processor that cannot convert float16
            return self.take_rows(packed, index, torch.float32, 1.0).to(dtype).mul_(scale)
        return out


def address(tensor: Tensor | None) -> int:
    """Returns the address of a tensor's data; null for None."""
    return 0 if tensor is None else tensor.data_ptr()

"""Chooses the codec of `kernels/codecs.h` for a weight."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.ops.cpu.calls import DTYPES
from quire.ops.linear import LinearWeight

INT8, E4M3, E5M2, INT4, TABLE4 = 3, 4, 5, 6, 7
"""`CodecNumber` in `kernels/codecs.h`."""

_CODECS = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: INT8, torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
}  # fmt: skip


@dataclass(frozen=True)
class Coded:
    """A weight in the form that the kernels pack.

    Attributes:
        codec: one of `CodecNumber`.
        shape: (out, in).
        codes: as in `QuantizedWeight`, or an unquantized weight.
        group: inputs that share a scale; all of an unquantized weight.
        scales: as in `QuantizedWeight`, like `offsets` (of the same dtype) and `order`.
        table: float32, the codec's parameters.
        flip: 4-bit codes are packed as `code ^ flip`.
        has_byte_inputs: as in `QuantizedWeight`.
    """

    codec: int
    shape: tuple[int, int]
    codes: Tensor
    group: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    flip: int = 0
    has_byte_inputs: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales and offsets."""
        return torch.float32 if self.scales is None else self.scales.dtype

    def with_wide_scales(self) -> "Coded":
        """Returns the same weight with scales and offsets in float32."""
        assert self.scales is not None
        return replace(self, scales=self.scales.float(), offsets=None if self.offsets is None else self.offsets.float())


def encode(weight: LinearWeight) -> Coded | None:
    """Prepares `weight` for the kernels; None if no codec takes it.

    Raises:
        ValueError: the number of its scales or offsets is wrong.
    """
    if isinstance(weight, Tensor):
        out, size = weight.shape
        codec = _CODECS.get(weight.dtype) if weight.dtype in DTYPES else None
        return None if codec is None else Coded(codec, (out, size), weight.contiguous(), size)
    weight = weight.checked()
    codec, table, flip = _CODECS.get(weight.codes.dtype), None, 0
    if weight.table is not None:
        codec, table, flip = INT4, *_line(weight.table)
        if table is None:
            codec, table = TABLE4, weight.table.float().contiguous()
    if codec is None or weight.scales.dtype not in DTYPES:
        return None
    offsets = weight.offsets
    return Coded(
        codec,
        (weight.shape[0], weight.shape[1]),
        weight.codes.contiguous(),
        weight.group_size,
        weight.scales.contiguous(),
        None if offsets is None else offsets.to(weight.scales.dtype).contiguous(),
        table,
        None if weight.input_order is None else weight.input_order.to(torch.int64).contiguous(),
        flip,
        weight.has_byte_inputs,
    )


def _line(table: Tensor) -> tuple[Tensor | None, int]:
    """Returns (factor, middle) if a table's values are `factor * n + middle` for n from -8 to 7 or in two's complement.

    Also returns the mask that turns its codes into two's complement.
    """
    if table.is_meta:
        return None, 0
    numbers = torch.arange(-8, 8, dtype=torch.float32)
    for values, flip in ((table.float(), 8), (table.float().roll(8), 0)):
        factor, middle = values[9] - values[8], values[8]
        if torch.equal(values, numbers * factor + middle):
            return torch.stack((factor, middle)), flip
    return None, 0

"""Quantized weights: the one form to which every quantized checkpoint is converted before a backend packs it."""

from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedWeight(NamedTuple):
    """A weight [out, in] of low-bit codes; neighbouring inputs of an output share a scale.

    weight[o, i] = value(codes[o, i]) * scales[o, i // group_size] + offsets[o, i // group_size]

    Formats differ in the value of a code. Zero points are offsets here (`-zero * scale`), and codes of two, three, five
    or six bits become codes of four or eight.

    Attributes:
        codes: [out, in] int8, float8_e4m3fn or float8_e5m2, each of which is its own value; or [out, in / 2] uint8 with
            two 4-bit codes a byte, the lower half first.
        scales: [out, in / group_size] float32, float16 or bfloat16.
        table: [16] float32, the values of 4-bit codes; None for longer codes.
        offsets: of the shape and dtype of `scales`; None: zeros.
        input_order: [in] int64: the weight's input i multiplies `x[:, input_order[i]]`; None: in order.
        has_byte_inputs: its makers rounded `x` to 8 bits, too. A backend may do so.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor | None = None
    offsets: Tensor | None = None
    input_order: Tensor | None = None
    has_byte_inputs: bool = False

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        out, size = self.codes.shape
        return torch.Size((out, size if self.table is None else 2 * size))

    @property
    def group_size(self) -> int:
        """The inputs that share a scale.

        Raises:
            ValueError: the groups do not divide the inputs.
        """
        size, num_groups = self.shape[1], self.scales.shape[1]
        if num_groups == 0 or size % num_groups:
            raise ValueError(f"{size} inputs are no {num_groups} groups of one size, each of which has a scale")
        return size // num_groups

    def checked(self) -> "QuantizedWeight":
        """Checks the number of scales and offsets, on which kernels rely, and returns this weight.

        Raises:
            ValueError: it does not match the codes.
        """
        expected = (self.shape[0], self.shape[1] // self.group_size)
        for kind, numbers in (("scales", self.scales), ("offsets", self.offsets)):
            if numbers is not None and numbers.shape != expected:
                raise ValueError(f"a weight {list(self.shape)} has {kind} {list(numbers.shape)}, not {list(expected)}")
        return self

    def rows(self, part: slice | Tensor) -> "QuantizedWeight":
        """Returns some of its outputs; those of a slice as views."""
        codes = self.codes.view(torch.uint8)[part].view(self.codes.dtype)  # torch indexes no float8
        offsets = None if self.offsets is None else self.offsets[part]
        return self._replace(codes=codes, scales=self.scales[part], offsets=offsets)

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors."""
        return sum(part.nbytes for part in self if isinstance(part, Tensor))


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes `weight` in the order of `x`'s inputs, [out, in]; computed in float32, then rounded to `dtype`."""
    shape = weight.shape
    if weight.codes.is_meta:
        return weight.codes.new_empty(shape, dtype=dtype)
    groups = (shape[0], weight.scales.shape[1], weight.group_size)
    numbers = _values(weight).view(groups) * weight.scales.float().unsqueeze(-1)
    if weight.offsets is not None:
        numbers += weight.offsets.float().unsqueeze(-1)
    numbers = numbers.view(shape).to(dtype)
    if weight.input_order is None:
        return numbers
    ordered = torch.empty_like(numbers)
    ordered[:, weight.input_order] = numbers
    return ordered


def _values(weight: QuantizedWeight) -> Tensor:
    if weight.table is None:
        return weight.codes.float()
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1)
    return weight.table[codes.int()].view(weight.shape)

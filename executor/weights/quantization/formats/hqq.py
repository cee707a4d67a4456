"""The layer format of HQQ (https://mobiusml.github.io/hqq_blog/): codes of one to eight bits with float zero points."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import integers
from quire.executor.weights.quantization.fields import integer, mapping
from quire.executor.weights.quantization.log_once import log_expanded
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.linear import LinearWeight

_BITS = (1, 2, 3, 4, 8)
"""The supported widths of a code."""
_PER_WORD = 10
"""3-bit codes in a 32-bit word."""
_DTYPES = {3: torch.int32}
"""The dtypes that hold codes, if not bytes."""


@dataclass(frozen=True)
class Hqq:
    """Codes `W_q`, with `scale` and `zero`; a value is `(code - zero) * scale`.

    The values of all rows, one after another, are the rows of a matrix [groups, group_size] (axis 1), or the columns of
    one (axis 0). Codes of the first part of the matrix's rows are the upper bits of `W_q`, those of the last part the
    lowest.

    Attributes:
        bits, group_size, axis: expected where the tensors are not known.
        other_bits: widths of codes in some layers.
    """

    bits: int = 4
    group_size: int = 64
    axis: int = 1
    other_bits: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Hqq":
        """Builds the layer format that a quantization config describes; its first one, if layers differ."""
        given = mapping(config, "quant_config")
        first, *more = list(_parameters(given)) or [given]
        bits = integer(first, "nbits", 4)
        all_bits = {bits, *(integer(each, "nbits", 4) for each in more)}
        for each in all_bits - set(_BITS):
            raise ModelLoadError(f"config.json's quantization_config has {each} as nbits; take 1, 2, 3, 4 or 8 bits.")
        return cls(bits, integer(first, "group_size", -1) or -1, integer(first, "axis", 1), tuple(all_bits - {bits}))

    @property
    def all_bits(self) -> tuple[int, ...]:
        """The possible widths of codes, the expected one first."""
        return (self.bits, *self.other_bits)

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("W_q")

    def read(self, layer: StoredLayer) -> LinearWeight:
        out, size = layer.out_features, layer.in_features
        group = self.group_size if self.group_size > 0 else size
        expected = (out * size // group, 1) if self.axis == 1 else (1, out * size // group)
        shape = layer.shape("scale", expected)
        is_grouped = len(shape) == 2 and shape[1] == 1
        num_groups = math.prod(shape)
        if len(shape) != 2 or 1 not in shape or not num_groups or out * size % num_groups:
            raise layer.mismatch("scale", f"[groups, 1] (axis 1) or [1, groups] (axis 0), groups of {group} numbers")
        group = out * size // num_groups
        bits, codes = self._codes(layer, (num_groups, group) if is_grouped else (group, num_groups))
        scales, zeros = (layer.read(kind, shape, torch.float32, dim=None) for kind in ("scale", "zero"))
        rows = slice(layer.rows.start, layer.rows.stop)
        if is_grouped and size % group == 0:
            scales, zeros = (each.view(out, -1)[rows].contiguous() for each in (scales, zeros))
            return integers(codes.view(out, size)[rows], bits, scales, zeros)
        log_expanded(layer.dtype, "in groups that are not neighbouring inputs of one output (axis 0)")
        return ((codes.float() - zeros) * scales).view(out, size)[rows].to(layer.dtype)

    def _codes(self, layer: StoredLayer, shape: tuple[int, int]) -> tuple[int, Tensor]:
        """Reads (bits, the codes of the whole layer, uint8 of `shape`)."""
        count, width = shape
        expected = (-(-count // _PER_WORD) if self.bits == 3 else count * self.bits // 8, width)
        stored = layer.shape("W_q", expected)
        dtype = layer.stored_dtype("W_q", torch.int32 if self.bits == 3 else torch.uint8)
        sizes = {bits: (-(-count // _PER_WORD) if bits == 3 else count * bits // 8, width) for bits in self.all_bits}
        fitting = [bits for bits, size in sizes.items() if size == stored and dtype == _DTYPES.get(bits, torch.uint8)]
        if not fitting:
            named = " or ".join(map(str, self.all_bits))
            raise layer.mismatch("W_q", f"HQQ's codes of {named} bits, {count} x {width} numbers")
        bits = fitting[0]
        packed = layer.read("W_q", stored, dtype, dim=None)
        num_parts = _PER_WORD if bits == 3 else 8 // bits
        parts = [(packed >> (bits * (num_parts - 1 - part))) & ((1 << bits) - 1) for part in range(num_parts)]
        return bits, torch.cat(parts)[:count].to(torch.uint8)


def _parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rounding parameters: those of all layers, or of layers by name in one object or several."""
    if "nbits" in config:
        yield config
        return
    for each in config.values():
        if isinstance(each, Mapping):
            yield from _parameters(each)

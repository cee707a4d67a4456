"""Marlin's layer format for the sparse tensor cores of NVIDIA (`marlin-24` of compressed-tensors, arXiv:2408.11743)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.weights.quantization.bit_packing import integers, unpack
from quire.executor.weights.quantization.groups import num_groups_of
from quire.executor.weights.quantization.log_once import WITHOUT_ZEROS, log_expanded
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.quantized import QuantizedWeight

_INPUTS, _OUTPUTS = 32, 64
"""Outputs and inputs of a tile. Two of four neighbouring inputs are stored, so a tile has 16 codes an output."""


@dataclass(frozen=True)
class SparseMarlin:
    """2:4 sparse integers in Marlin's order. Reading adds codes of zero for the elements that are not stored.

    `weight_packed` int32 [in / 32, out * bits / 2] has the stored codes, which count from the smallest value. `meta`
    int16 [in / 32, 2 * out] has the place of each among four inputs, in two bits. `scale_packed` is [groups, out]. All
    are in the orders in which the threads of a GPU load them.

    Attributes:
        bits: of a code, 4 or 8; expected where the tensors are not known, as is `group_size`.
        group_size: inputs of a group; -1: all.
    """

    bits: int = 4
    group_size: int = -1

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("weight_packed", torch.int32) and layer.has("meta", torch.int16)

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        if out % _OUTPUTS or size % _INPUTS:
            raise layer.mismatch("weight_packed", f"outputs by {_OUTPUTS} and inputs by {_INPUTS} (marlin-24)")
        shapes = {bits: (size // _INPUTS, out * bits // 2) for bits in (self.bits, 4, 8)}
        stored = layer.shape("weight_packed", shapes[self.bits])
        bits = next((each for each, shape in shapes.items() if shape == stored), None)
        if bits is None:
            raise layer.mismatch("weight_packed", f"{list(shapes[4])} for 4 bits or {list(shapes[8])} for 8")
        log_expanded(f"{bits} bits", WITHOUT_ZEROS)
        kept = _kept(unpack(layer.read("weight_packed", stored, torch.int32, dim=None), bits, out * 16), bits)
        meta = layer.read("meta", (size // _INPUTS, 2 * out), torch.int16, dim=None)
        dense = torch.full((out, size // 4, 4), 1 << (bits - 1), dtype=torch.uint8, device=kept.device)
        places = unpack(_in_rows(meta), 2, size // 2).unflatten(1, (-1, 2))
        dense.scatter_(2, places.long(), kept.unflatten(1, (-1, 2)))
        rows = slice(layer.rows.start, layer.rows.stop)
        return integers(dense.flatten(1)[rows], bits, self._scales(layer)[rows].contiguous())

    def _scales(self, layer: StoredLayer) -> Tensor:
        """Reads the scales [out, groups]."""
        out, size, kind = layer.out_features, layer.in_features, "scale_packed"
        num_groups, *_ = layer.shape(kind, (num_groups_of(size, self.group_size), out))
        group = layer.group_size(kind, num_groups, self.group_size)
        dtype = layer.scale_dtype(kind) if layer.is_known else torch.float16
        stored = layer.read(kind, (num_groups, out), dtype, dim=None)
        if group < size // 2:  # the writer compares with the number of stored codes
            stored = stored.unflatten(1, (-1, 4, 2)).transpose(-1, -2).flatten(1)
        return stored.t()


def _kept(codes: Tensor, bits: int) -> Tensor:
    """Reorders codes [in / 32, 16 * out] to [out, in / 2].

    Comments name the binary digits of an output's index by their weights, and in brackets those of a code's index in
    its tile.
    """
    if bits == 4:
        digits = codes.unflatten(1, (-1, 4, 2, 4, 4, 2, 2, 2))  # 64, 16, 8, (2), 1, (1), 4, (8)
        ordered = digits.permute(1, 2, 3, 7, 5, 0, 8, 4, 6)
    else:
        digits = codes.unflatten(1, (-1, 4, 2, 4, 4, 2, 2, 2))  # 64, 16, 8, (2), 1, 4, (1), (8)
        ordered = digits.permute(1, 2, 3, 6, 5, 0, 8, 4, 7)
    return ordered.flatten(5).flatten(0, 4)


def _in_rows(meta: Tensor) -> Tensor:
    """Reorders words int16 [in / 32, 2 * out] of eight places to [out, in / 16].

    Comments name the digits as in `_kept`.
    """
    digits = meta.view(len(meta), -1, 2, 8, 2, 2, 2)  # (2), 64, 2, 8, 1, (1), 4
    return digits.permute(1, 3, 6, 2, 4, 0, 5).flatten(5).flatten(0, 4).contiguous()

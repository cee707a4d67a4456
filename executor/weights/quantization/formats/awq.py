"""AWQ's codes (arXiv:2306.00978), packed into words along the outputs (as Quark's int4) or along the inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.bit_packing import (
    PER_WORD,
    integers,
    pack_pairs,
    packed_integers,
    table,
    unpack,
)
from quire.executor.weights.quantization.groups import equal_groups, num_groups_of
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.quantized import QuantizedWeight

_BITS = 4
_UNSIGNED = tuple(float(code) for code in range(16))
GEMM = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each output in a word: outputs 0, 2, 4, 6, 1, 3, 5, 7 follow one another from the lowest bit."""
_GEMM_OF_BYTES = (0, 2, 1, 3)
"""The order of vLLM's Marlin kernels, the only ones that read 8-bit codes."""


@dataclass(frozen=True)
class PackedOutputs:
    """Codes int32 [in, words], scales [groups, out], and perhaps zero points int32 [groups, words].

    Attributes:
        codes, zeros, scales: the kinds of the tensors.
        bits: of a code. Codes of 5 to 7 bits may begin in a word and end in the next.
        places: the place in a word of each of eight outputs (four, with 8 bits).
        is_signed: codes are from -8 to 7 instead of from 0 to 15.
        group_size: inputs of a group, for layers whose tensors do not determine it; -1: all.
        has_zeros: there are zero points; without them, the middle is zero.
    """

    codes: str = "qweight"
    zeros: str = "qzeros"
    scales: str = "scales"
    bits: int = _BITS
    places: tuple[int, ...] = GEMM
    is_signed: bool = False
    group_size: int = 128
    has_zeros: bool = True

    def is_in(self, layer: StoredLayer) -> bool:
        is_packed = layer.shape(self.codes, ()) != (layer.in_features, layer.out_features)  # of Quark's int2
        return layer.has(self.codes, torch.int32) and len(layer.shape(self.scales, ())) == 2 and is_packed

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        num_groups, *_ = layer.shape(self.scales, (num_groups_of(size, self.group_size), out)) or (0,)
        group = layer.group_size(self.scales, num_groups, self.group_size)
        scales = layer.read(self.scales, (num_groups, out), layer.scale_dtype(self.scales), dim=1).t()
        scales, zeros = equal_groups(scales.contiguous(), size, group), None
        if self.has_zeros or layer.has(self.zeros):
            if layer.is_known and not layer.has(self.zeros):
                raise layer.mismatch(self.zeros, "zero points (zero_point: true, or symmetric: false)")
            stored = self._unpacked(layer, self.zeros, num_groups)
            if not (self.is_signed and layer.are_zero(stored)):
                zeros = equal_groups(stored ^ 8 if self.is_signed else stored, size, group)
        if self.bits != _BITS:
            return integers(self._unpacked(layer, self.codes, size), self.bits, scales, zeros)
        pairs = self._pairs(layer, size)
        return packed_integers(pairs ^ 0x88 if self.is_signed else pairs, _BITS, scales, zeros)

    def _pairs(self, layer: StoredLayer, size: int) -> Tensor:
        """Reads the codes of the wanted outputs, two inputs a byte: uint8 [outputs, in / 2]."""
        if size % 2:
            raise ModelLoadError(f"{layer.name}: {size} inputs are an odd number, which codes of four bits cannot be.")
        shape = (size, -(-layer.out_features // PER_WORD))
        words = layer.read(self.codes, shape, torch.int32, dim=1, per=PER_WORD).contiguous()
        if words.is_meta:
            return words.new_empty((len(layer.rows), size // 2), dtype=torch.uint8)
        even, odd = words.view(torch.uint8).unflatten(1, (-1, 4)).unflatten(0, (-1, 2)).unbind(1)
        by_place = torch.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), dim=-1).flatten(2)
        codes = by_place[..., list(self.places)].permute(1, 2, 0).flatten(0, 1)
        return layer.trim(codes, 0, PER_WORD).contiguous()

    def _unpacked(self, layer: StoredLayer, kind: str, rows: int) -> Tensor:
        """Reads the codes of the wanted outputs, uint8 [outputs, rows]."""
        num_places = len(self.places)
        count = -(-layer.out_features // num_places) * num_places
        shape = (rows, -(-count * self.bits // 32))
        per, has_whole_codes = 32 // self.bits, 32 % self.bits == 0
        words = layer.read(kind, shape, torch.int32, dim=1 if has_whole_codes else None, per=per)
        codes = unpack(words, self.bits, words.shape[1] * per if has_whole_codes else count)
        codes = codes.unflatten(1, (-1, num_places))[..., list(self.places)].flatten(1)
        wanted = layer.trim(codes, 1, per) if has_whole_codes else codes[:, layer.rows.start : layer.rows.stop]
        return wanted.t().contiguous()


@dataclass(frozen=True)
class PackedInputs:
    """Codes of AWQ in the order `gemv`.

    Codes are `qweight` int32 [out, in / 8], zero points `qzeros` int32 [out, words], each from the lowest bit on.
    `scales` are [out, 8 * words]: a row may be longer than its number of groups.

    Attributes:
        group_size: inputs of a group; -1: all.
    """

    group_size: int = 128

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("qweight", torch.int32) and layer.has("scales")

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        words = layer.read("qweight", (out, size // PER_WORD), torch.int32).contiguous()
        num_groups = num_groups_of(size, self.group_size)
        group = size if num_groups == 1 else self.group_size
        shape = layer.shape("qzeros", (out, -(-num_groups // PER_WORD)))
        if len(shape) != 2 or shape[0] != out or shape[1] * PER_WORD < num_groups:
            raise layer.mismatch("qzeros", f"zero points of at least {num_groups} groups (gemv)")
        zeros = unpack(layer.read("qzeros", shape, torch.int32), _BITS, num_groups)
        shape = layer.shape("scales", (out, shape[1] * PER_WORD))
        if len(shape) != 2 or shape[0] != out or shape[1] < num_groups:
            raise layer.mismatch("scales", f"scales of at least {num_groups} groups (gemv)")
        scales = layer.read("scales", shape, layer.scale_dtype("scales"))[:, :num_groups].contiguous()
        return packed_integers(
            words.view(torch.uint8), _BITS, equal_groups(scales, size, group), equal_groups(zeros, size, group)
        )


@dataclass(frozen=True)
class InterleavedRows:
    """Codes of AWQ in the order `gemv_fast`, whose kernel reads four outputs together.

    Codes are `qweight` int16 [out / 4, in], each row a stream from the lowest bit on: 64 inputs of the first of four
    outputs, those of the next three, then the next 64 inputs. Within each 32 inputs, the code [i, j, k] of [4, 2, 4] is
    of the input 8k + 2i + j. `scales` and `scaled_zeros` are [groups, out], and may have more groups than there are. A
    value is `code * scale + scaled_zero`. AutoAWQ calls the latter `qzeros`, in float16.

    Attributes:
        group_size: inputs of a group; -1: all.
    """

    group_size: int = 128
    _outputs: int = 4
    _inputs: int = 64

    def is_in(self, layer: StoredLayer) -> bool:
        return layer.has("qweight", torch.int16) and (layer.has("scaled_zeros") or layer.has("qzeros", torch.float16))

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        out, size = layer.out_features, layer.in_features
        if out % self._outputs or size % self._inputs:
            raise layer.mismatch("qweight", f"outputs by {self._outputs} and inputs by {self._inputs} (gemv_fast)")
        words = layer.read("qweight", (out // self._outputs, size), torch.int16, per=self._outputs)
        codes = unpack(words, _BITS, size * self._outputs).view(len(words), -1, self._outputs, self._inputs)
        rows = layer.trim(codes.transpose(1, 2).reshape(-1, size), 0, self._outputs)
        pairs = pack_pairs(rows.reshape(len(rows), -1, 4, 2, 4).permute(0, 1, 4, 2, 3).flatten(1))
        num_groups = num_groups_of(size, self.group_size)
        shape = layer.shape("scales", (num_groups, out))
        if len(shape) != 2 or shape[0] < num_groups or shape[1] != out:
            raise layer.mismatch("scales", f"scales of at least {num_groups} groups (gemv_fast)")
        dtype = layer.scale_dtype("scales") if layer.is_known else torch.float16
        kinds = ("scales", "qzeros" if layer.has("qzeros") else "scaled_zeros")
        scales, zeros = (layer.read(kind, shape, dtype, dim=1)[:num_groups].t() for kind in kinds)
        group = size if num_groups == 1 else self.group_size
        scales, zeros = (equal_groups(each.contiguous(), size, group) for each in (scales, zeros))
        return QuantizedWeight(pairs, scales, table(_UNSIGNED, pairs.device), zeros)


def awq_gemm(bits: int, group_size: int, *, has_zeros: bool) -> PackedOutputs:
    """The layer format of AWQ in the order `gemm`, with 4 to 8 bits."""
    places = _GEMM_OF_BYTES if bits == 8 else GEMM
    return PackedOutputs(bits=bits, places=places, group_size=group_size, has_zeros=has_zeros)

"""Quantizes weights when a checkpoint of 16 or 32 bits is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from quire.core.logging import get_logger
from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.bit_packing import FP4, INT4, pack_pairs, table
from quire.executor.weights.quantization.formats.bitsandbytes import NF4
from quire.executor.weights.quantization.int8 import quantize as to_int8
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import TensorSource
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight

logger = get_logger(__name__)

_PART = 1 << 20
"""The most elements that are converted to float32 at once. With more, memory bandwidth limits the speed."""
_LARGEST_FLOAT8 = 448.0
_LARGEST_FP4_EXPONENT = 2  # of 4.0, the largest power of two in E2M1
_LARGEST_FLOAT8_EXPONENT = 8  # of 256, that in E4M3
_INT4_GROUP, _MX_GROUP, _NF4_GROUP, _FLOAT8_BLOCK = 32, 32, 64, 128

Rounding = Callable[[Tensor], QuantizedWeight]
"""Rounds a weight [out, in] to the nearest values of a format."""


@dataclass(frozen=True)
class Online:
    """Quantizes each layer's weight as soon as it is read, so that at most one is in memory whole.

    A scale depends on its group's inputs, and on its block's outputs. A rank that holds some of them reads the whole
    layer and keeps its part, so that all ranks together hold the values of a single rank.

    Attributes:
        rounding: rounds a layer.
        group_size: inputs that share a scale; None: all. A layer whose inputs are no multiple of it stays unquantized.
        block_outputs: outputs that share a scale; None: all of a layer. The last block may be shorter.
        unquantized: the names of layers that stayed so, as they are read, or as a dry build pretends to read them.
    """

    rounding: Rounding
    group_size: int | None = None
    block_outputs: int | None = 1
    unquantized: set[str] = field(default_factory=set, compare=False)

    def read_weight(self, source: TensorSource, part: LinearPart, in_features: int) -> LinearWeight:
        name, shape, shard = f"{part.name}.weight", (part.out_features, in_features), part.shard
        if self.group_size is not None and in_features % self.group_size:
            self.unquantized.add(part.name)
            return source.read(name, shape, shard)
        per, size = (self.block_outputs, self.group_size)[shard.dim], shape[shard.dim]
        if _cuts_none((shard.start, shard.stop), size if per is None else per, size):
            return self._rounded(source.read(name, shape, shard))
        rounded = self._rounded(source.read(name, shape))
        if shard.dim == 1:
            return sharding.take_inputs(rounded, shard.start, shard.stop, torch.float32, part.name)
        rows = rounded.rows(slice(shard.start, shard.stop))
        return rows._replace(codes=rows.codes.clone(), scales=rows.scales.clone())  # views would keep the whole layer

    def read_dequantized(self, source: TensorSource, part: LinearPart, in_features: int, dtype: torch.dtype) -> Tensor:
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard, dtype)

    def read_rows(self, source: TensorSource, part: LinearPart, in_features: int) -> Tensor:
        return source.read(f"{part.name}.weight", (part.out_features, in_features), part.shard)

    def for_head(self, rows: LinearWeight, part: LinearPart) -> QuantizedWeight:
        """Quantizes the head to int8 in all formats, because its rounding shows in every logit."""
        assert isinstance(rows, Tensor), "see read_rows"
        return to_int8(rows)

    def log_unquantized(self) -> None:
        """Logs how many layers stay unquantized, if any do. Called once the model has been built, or dry-built."""
        if self.unquantized:
            logger.warning(
                "%d linear layers stay as the checkpoint has them, such as %s: their inputs are no multiple of %d; "
                "--quantization int8 or fp8 takes any number",
                *(len(self.unquantized), min(self.unquantized), self.group_size),
            )

    def _rounded(self, weight: Tensor) -> QuantizedWeight:
        """Rounds in parts, so that only one part at a time is in float32."""
        size = max(1, _PART // weight.shape[1])
        if self.block_outputs is not None:
            size = -(-size // self.block_outputs) * self.block_outputs
        if weight.is_meta or len(weight) <= size or self.block_outputs is None:
            return self.rounding(weight)
        rounded = [self.rounding(part) for part in weight.split(size)]
        joined = sharding.join(rounded, torch.float32)
        assert isinstance(joined, QuantizedWeight)
        return joined


def to_float8(weight: Tensor) -> QuantizedWeight:
    """Rounds to E4M3 with a float32 scale for each output."""
    if weight.is_meta:
        return QuantizedWeight(weight.to(torch.float8_e4m3fn), weight.new_empty(len(weight), 1, dtype=torch.float32))
    full = weight.float()
    scales = full.abs().amax(1, keepdim=True) / _LARGEST_FLOAT8
    return QuantizedWeight((full / _divisors(scales)).to(torch.float8_e4m3fn), scales)


def to_float8_of_tensor(weight: Tensor) -> QuantizedWeight:
    """Rounds to E4M3 with one float32 scale, in parts, as `Online` does for roundings that need not see the whole."""
    codes = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = weight.new_empty(len(weight), 1, dtype=torch.float32)
    if weight.is_meta:
        return QuantizedWeight(codes, scales)
    largest = torch.maximum(weight.amax(), -weight.amin()).float()
    scales.fill_(largest / _LARGEST_FLOAT8)
    size = max(1, _PART // weight.shape[1])
    for part, part_codes in zip(weight.split(size), codes.split(size), strict=True):
        part_codes.copy_(part.float() / _divisors(scales[:1]))
    return QuantizedWeight(codes, scales)


def to_float8_of_blocks(weight: Tensor) -> QuantizedWeight:
    """Rounds to E4M3 with a float32 scale for 128 outputs and 128 inputs; the last block may have fewer outputs."""
    groups = _groups(weight, _FLOAT8_BLOCK)
    if weight.is_meta:
        return QuantizedWeight(weight.to(torch.float8_e4m3fn), groups[:, :, 0])
    largest = groups.abs().amax(2).split(_FLOAT8_BLOCK)  # each [outputs of a block, groups]
    scales = torch.cat([block.amax(0, keepdim=True).expand_as(block) for block in largest]) / _LARGEST_FLOAT8
    return _float8_of_groups(groups, scales)


def to_mxfp8(weight: Tensor) -> QuantizedWeight:
    """Rounds to MXFP8 (OCP Microscaling Formats, version 1.0, section 6.3): E4M3, groups of 32 with a power of two."""
    groups = _groups(weight, _MX_GROUP)
    if weight.is_meta:
        return QuantizedWeight(weight.to(torch.float8_e4m3fn), groups[:, :, 0].bfloat16())
    scales = _shared_powers(groups, _LARGEST_FLOAT8_EXPONENT).squeeze(2)
    rounded = _float8_of_groups(groups, scales)
    return rounded._replace(scales=scales.bfloat16())


def to_int4(weight: Tensor) -> QuantizedWeight:
    """Rounds in groups of 32 with a 16-bit scale. The group's largest magnitude, with its sign, gets the code -8."""
    groups = _groups(weight, _INT4_GROUP)
    dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
    if weight.is_meta:
        return _packed(groups, groups[:, :, :1].to(dtype), INT4)
    highest, lowest = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)  # `argmax` takes five times as long
    largest = torch.where(highest > -lowest, highest, lowest)
    scales = (largest / -8).to(dtype)
    codes = (groups / _divisors(scales.float())).round_().clamp_(-8, 7).add_(8)
    return _packed(codes, scales, INT4)


def to_mxfp4(weight: Tensor) -> QuantizedWeight:
    """Rounds to MXFP4 (OCP Microscaling Formats, version 1.0, section 6.3): groups of 32 with a power of two."""
    groups = _groups(weight, _MX_GROUP)
    if weight.is_meta:
        return _packed(groups, groups[:, :, :1].bfloat16(), FP4)
    scales = _shared_powers(groups, _LARGEST_FP4_EXPONENT)
    return _nearest(groups / scales, scales.bfloat16(), FP4)


def to_nf4(weight: Tensor) -> QuantizedWeight:
    """Rounds to NF4 of bitsandbytes: groups of 64 with their largest magnitude as the scale."""
    groups = _groups(weight, _NF4_GROUP)
    if weight.is_meta:
        return _packed(groups, groups[:, :, :1], NF4)
    scales = groups.abs().amax(2, keepdim=True)
    return _nearest(groups / _divisors(scales), scales, NF4)


def _cuts_none(ends: tuple[int, int], per: int, size: int) -> bool:
    """Returns True if no run of `per` of `size` elements crosses an end."""
    return all(end % per == 0 or end == size for end in ends)


def _shared_powers(groups: Tensor, largest_exponent: int) -> Tensor:
    """Computes the power of two of each group [out, groups, 1], for values with exponents up to `largest_exponent`."""
    largest = groups.abs().amax(2, keepdim=True)
    exponents = torch.frexp(largest).exponent - 1 - largest_exponent
    return torch.ldexp(torch.ones_like(largest), exponents.clamp_(-127, 127))


def _float8_of_groups(groups: Tensor, scales: Tensor) -> QuantizedWeight:
    """Rounds `groups` [out, groups, size] to E4M3. A shared power leaves some values beyond its range; they become its
    largest.
    """
    codes = (groups / _divisors(scales).unsqueeze(2)).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
    return QuantizedWeight(codes.flatten(1).to(torch.float8_e4m3fn), scales)


def _groups(weight: Tensor, size: int) -> Tensor:
    return weight.float().unflatten(1, (-1, size))


def _divisors(scales: Tensor) -> Tensor:
    return scales.masked_fill(scales == 0, 1)


def _nearest(numbers: Tensor, scales: Tensor, values: tuple[float, ...]) -> QuantizedWeight:
    """Returns the codes of the values nearest to `numbers` [out, groups, size]; a tie goes to the smaller value."""
    order = sorted(range(16), key=values.__getitem__)
    codes = torch.full_like(numbers, order[0], dtype=torch.int8)
    for code, above in pairwise(order):  # fifteen comparisons are faster than `torch.bucketize`
        middle = (values[code] + values[above]) / 2
        codes.add_(numbers > middle, alpha=above - code)
    return _packed(codes, scales, values)


def _packed(codes: Tensor, scales: Tensor, values: tuple[float, ...]) -> QuantizedWeight:
    pairs = pack_pairs(codes.to(torch.uint8).flatten(1))
    return QuantizedWeight(pairs, scales.squeeze(2), table(values, codes.device))


ONLINE: Mapping[str, Online] = {
    "int8": Online(to_int8),
    "fp8": Online(to_float8),
    "fp8_per_tensor": Online(to_float8_of_tensor, block_outputs=None),
    "fp8_per_block": Online(to_float8_of_blocks, _FLOAT8_BLOCK, _FLOAT8_BLOCK),
    "mxfp8": Online(to_mxfp8, _MX_GROUP),
    "int4": Online(to_int4, _INT4_GROUP),
    "mxfp4": Online(to_mxfp4, _MX_GROUP),
    "bitsandbytes": Online(to_nf4, _NF4_GROUP),
}
"""The rounding of each value of `--quantization`."""

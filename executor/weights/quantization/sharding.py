"""Splits quantized weights into ranks' shards, and joins the weights of one product."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.weights.quantization.log_once import log_expanded
from quire.ops.linear import LinearWeight
from quire.ops.quantized import QuantizedWeight, dequantize


def dequantized(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """Dequantizes a weight, [out, in]."""
    return dequantize(weight, dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


def take_inputs(weight: QuantizedWeight, start: int, stop: int, dtype: torch.dtype, name: str) -> LinearWeight:
    """Takes the inputs `start:stop` of a weight. A group that the slice cuts keeps its scale on both sides.

    A weight whose inputs are in another order has groups of different lengths after the cut: it is dequantized to
    `dtype`.

    Raises:
        ModelLoadError: two codes of one byte would go to different ranks, and their values are not integers.
    """
    if (start, stop) == (0, weight.shape[1]):
        return weight
    if weight.input_order is not None:
        log_expanded(dtype, "in an order of their inputs that ranks cut")
        return dequantize(weight, dtype)[:, start:stop].contiguous()
    if start % 2 or stop % 2:
        weight = unpack_to_int8(weight)
    per = 1 if weight.table is None else 2
    if start % per or stop % per:
        raise ModelLoadError(
            f"{name}: a rank would have inputs {start} to {stop}, which cuts a byte of two codes. Choose a "
            "tensor_parallel_size that leaves every rank an even number of inputs."
        )
    codes = weight.codes[:, start // per : stop // per].contiguous()
    if weight.scales.shape[1] == 1:
        return weight._replace(codes=codes)
    weight = regroup(weight, math.gcd(weight.group_size, start, stop))
    groups = slice(start // weight.group_size, stop // weight.group_size)
    return weight._replace(
        codes=codes,
        scales=weight.scales[:, groups].contiguous(),
        offsets=None if weight.offsets is None else weight.offsets[:, groups].contiguous(),
    )


def pad_outputs(weight: LinearWeight, count: int) -> LinearWeight:
    """Pads a weight with outputs of zeros, to `count` in all."""
    missing = count - weight.shape[0]
    if not missing:
        return weight
    if isinstance(weight, Tensor):
        return F.pad(weight, (0, 0, 0, missing))
    codes = F.pad(weight.codes.view(torch.uint8), (0, 0, 0, missing)).view(weight.codes.dtype)
    rows = (0, 0, 0, missing)
    offsets = None if weight.offsets is None else F.pad(weight.offsets, rows)
    return weight._replace(codes=codes, scales=F.pad(weight.scales, rows), offsets=offsets)


def regroup(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """Returns the same values in smaller groups, whose size divides the old one."""
    times = weight.group_size // group_size
    if times == 1:
        return weight
    offsets = weight.offsets
    return weight._replace(
        scales=weight.scales.repeat_interleave(times, 1),
        offsets=None if offsets is None else offsets.repeat_interleave(times, 1),
    )


def runs(weights: Sequence[LinearWeight]) -> list[slice]:
    """Groups neighbouring `weights` of one form, for `join`, into slices. All have the same inputs."""
    breaks = [index for index, pair in enumerate(pairwise(weights), 1) if not _are_alike(*pair)]
    return [slice(start, stop) for start, stop in pairwise([0, *breaks, len(weights)])]


def join(weights: Sequence[LinearWeight], dtype: torch.dtype) -> LinearWeight:
    """Joins weights of one form with the same inputs (one slice of `runs`) along the outputs: [sum of out, in]."""
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights):
        return torch.cat([dequantized(weight, dtype) for weight in weights])
    group_size = math.gcd(*(weight.group_size for weight in quantized))
    quantized = [regroup(weight, group_size) for weight in quantized]
    scales = [weight.scales for weight in quantized]
    if len({each.dtype for each in scales}) > 1:
        scales = [each.float() for each in scales]
    offsets: Tensor | None = None
    if any(weight.offsets is not None for weight in quantized):
        offsets = torch.cat(
            [
                torch.zeros_like(scale) if weight.offsets is None else weight.offsets.to(scale.dtype)
                for weight, scale in zip(quantized, scales, strict=True)
            ]
        )
    return quantized[0]._replace(
        codes=_cat([weight.codes for weight in quantized]),
        scales=torch.cat(scales),
        offsets=offsets,
        has_byte_inputs=all(weight.has_byte_inputs for weight in quantized),
    )


def join_inputs(weights: Sequence[LinearWeight]) -> LinearWeight:
    """Joins weights with the same outputs that one layer was cut into: [out, sum of in].

    None of them has its inputs in another order: such a layer is not cut (`take_inputs`).
    """
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)], dim=1)
    group_size = math.gcd(*(weight.group_size for weight in quantized))
    quantized = [regroup(weight, group_size) for weight in quantized]
    offsets = [weight.offsets for weight in quantized if weight.offsets is not None]
    return quantized[0]._replace(
        codes=_cat([weight.codes for weight in quantized], dim=1),
        scales=torch.cat([weight.scales for weight in quantized], dim=1),
        offsets=torch.cat(offsets, dim=1) if offsets else None,
    )


def unpack_to_int8(weight: QuantizedWeight) -> QuantizedWeight:
    """Unpacks 4-bit codes of integers to int8; returns any other weight unchanged."""
    if weight.table is None:
        return weight
    if weight.table.is_meta:
        return weight._replace(codes=weight.codes.new_empty(weight.shape, dtype=torch.int8), table=None)
    if not torch.equal(weight.table, weight.table.trunc()):
        return weight
    pairs = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(-2)
    return weight._replace(codes=weight.table.to(torch.int8)[pairs.int()], table=None)


def _are_alike(one: LinearWeight, other: LinearWeight) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    mine, theirs = one.input_order, other.input_order
    if mine is None or theirs is None:
        return _have_alike_codes(one, other) and mine is theirs
    return _have_alike_codes(one, other) and (mine.is_meta or torch.equal(mine, theirs))


def _have_alike_codes(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Returns True if the codes have the same values. Equal tables are one object (`codes.table`), also on meta."""
    if one.table is None or other.table is None:
        return one.codes.dtype == other.codes.dtype and one.table is other.table
    return one.table is other.table or (not one.table.is_meta and torch.equal(one.table, other.table))


def _cat(codes: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([each.view(torch.uint8) for each in codes], dim).view(codes[0].dtype)

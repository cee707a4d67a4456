"""Weights whose groups are not neighbouring inputs: act-order of GPTQ and compressed-tensors (`g_idx`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.executor.weights.quantization import sharding
from quire.executor.weights.quantization.bit_packing import integers
from quire.executor.weights.quantization.groups import equal_groups, find_group
from quire.executor.weights.quantization.log_once import log_expanded
from quire.executor.weights.quantization.stored_layer import StoredLayer
from quire.ops.linear import LinearWeight


class InputOrder(NamedTuple):
    """The assignment of a layer's inputs to groups.

    Attributes:
        groups: each input's group, int64 [in].
        inputs: the inputs in the order of their groups, int64 [in].
        group_size: inputs of each group (fewer in the last one); None: groups of different lengths.
    """

    groups: Tensor
    inputs: Tensor
    group_size: int | None


def read_order(
    layer: StoredLayer, kind: str, num_groups: int, group_size: int, *, is_expected: bool
) -> InputOrder | None:
    """Reads the order in `kind` [in] int32; None if the inputs are in the order of their groups.

    Args:
        group_size: inputs of a group, as the configuration says.
        is_expected: an order is assumed where the tensor has no data (on the meta device).

    Raises:
        ModelLoadError: an input has a group without scales.
    """
    size = layer.in_features
    group = find_group(size, num_groups, group_size)
    if not layer.is_known:
        backwards = (torch.arange(size) // (group or size)).flip(0)
        return InputOrder(backwards, backwards.argsort(stable=True), group) if is_expected else None
    if not layer.has(kind):
        return None
    groups = layer.read(kind, (size,), torch.int32, dim=None).long()
    if groups.is_meta:
        return InputOrder(groups, groups, group) if is_expected else None
    if (groups < 0).any():
        return None  # a negative value means that the checkpoint has no order
    if (largest := int(groups.max())) != num_groups - 1:
        raise layer.mismatch(kind, f"groups below {num_groups}, as many as have scales, and the largest is {largest}")
    if group is not None and torch.equal(groups, _neighbours(groups, group)):
        return None
    inputs = groups.argsort(stable=True)
    first = max(1, int((groups == 0).sum()))
    return InputOrder(groups, inputs, first if torch.equal(groups[inputs], _neighbours(groups, first)) else None)


def _neighbours(groups: Tensor, group_size: int) -> Tensor:
    """The groups of inputs that are in their order."""
    return torch.arange(len(groups), device=groups.device) // group_size


def ordered_integers(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, order: InputOrder, dtype: torch.dtype
) -> LinearWeight:
    """Builds the weight of `integers` from `codes` [out, in] whose inputs have groups in this order.

    Groups of different lengths have no quantized form: such a weight is dequantized to `dtype`.
    """
    groups, inputs, size = order.groups.to(codes.device), order.inputs.to(codes.device), order.group_size
    if size is not None:
        scales, zeros = (
            equal_groups(scales, len(inputs), size),
            None if zeros is None else equal_groups(zeros, len(inputs), size),
        )
        return integers(codes[:, inputs], bits, scales, zeros, inputs)
    log_expanded(dtype, "in groups of different lengths")
    wide = None if zeros is None else zeros[:, groups]
    return sharding.dequantized(integers(codes, bits, scales[:, groups], wide), dtype)

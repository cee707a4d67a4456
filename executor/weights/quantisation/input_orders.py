"""Weights whose groups are not of neighbouring inputs: act-order of GPTQ and compressed-tensors (`g_idx`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.executor.weights.quantisation import cuts
from quire.executor.weights.quantisation.codes import integers
from quire.executor.weights.quantisation.notes import note_plain
from quire.executor.weights.quantisation.stored_layer import StoredLayer
from quire.ops.backend import LinearWeight


class InputOrder(NamedTuple):
    """Each input's group, int64 [in]; and the inputs in the order of their groups, int64 [in]."""

    groups: Tensor
    inputs: Tensor


def read_order(layer: StoredLayer, kind: str, num_groups: int, *, is_expected: bool) -> InputOrder | None:
    """The order that `kind` [in] int32 gives; None if the inputs are in the order of their groups.

    `is_expected`: what is assumed where there are no numbers.
    """
    size = layer.in_features
    if not layer.is_known:
        turns = torch.arange(size) % num_groups
        return InputOrder(turns, turns.argsort(stable=True)) if is_expected else None
    if not layer.has(kind):
        return None
    groups = layer.read(kind, (size,), torch.int32, dim=None).long()
    if groups.is_meta:
        return InputOrder(groups, groups) if is_expected else None
    if (groups < 0).any() or torch.equal(groups, _evenly(groups, num_groups)):
        return None  # a value below zero says that the checkpoint has no order
    return InputOrder(groups, groups.argsort(stable=True))


def ordered_integers(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, order: InputOrder, dtype: torch.dtype
) -> LinearWeight:
    """See `integers`, of `codes` [out, in] whose inputs have groups in this order.

    Groups of different lengths have no quantised form: such a weight is numbers of `dtype`.
    """
    groups, inputs = (each.to(codes.device) for each in order)
    if groups.is_meta or torch.equal(groups[inputs], _evenly(groups, scales.shape[1])):
        return integers(codes[:, inputs], bits, scales, zeros, inputs)
    note_plain(dtype, "in groups of different lengths")
    wide = None if zeros is None else zeros[:, groups]
    return cuts.plain(integers(codes, bits, scales[:, groups], wide), dtype)


def _evenly(groups: Tensor, num_groups: int) -> Tensor:
    return torch.arange(len(groups), device=groups.device) // -(-len(groups) // num_groups)

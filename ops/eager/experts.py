"""Mixture of experts in plain torch: tokens are sorted by expert, and each layer is one grouped product."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.backend import ExpertWeights, Int8Weight, LinearWeight

_ALIGNMENT = 16
"""The grouped product takes rows of a multiple of so many bytes."""
_PART = 1 << 24
"""Numbers of weights of one byte that are widened at once."""


@dataclass(frozen=True)
class GroupedLinear:
    """One linear layer of all experts. Numbers past the ends of its outputs and inputs are zero.

    Attributes:
        weight: [num_experts, out, in].
        scales: [num_experts, out] float32, if a number of the weight is one byte.
        bias: [num_experts, out].
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @classmethod
    def empty(cls, weight: LinearWeight, bias: Tensor | None, num_experts: int, out: int, size: int) -> "GroupedLinear":
        """Zeros for experts whose weights and biases are like those of one expert."""
        is_int8 = isinstance(weight, Int8Weight)
        values = weight.values if isinstance(weight, Int8Weight) else weight
        return cls(
            values.new_zeros(num_experts, out, size),
            values.new_zeros(num_experts, out, dtype=torch.float32) if is_int8 else None,
            None if bias is None else bias.new_zeros(num_experts, out),
        )

    def store(self, expert: int, first: int, weight: LinearWeight, bias: Tensor | None, part: slice) -> None:
        """Stores rows `part` of one expert's `weight` and `bias` from row `first` on."""
        values, scales = weight if isinstance(weight, Int8Weight) else (weight, None)
        rows = values[part]
        end = first + len(rows)
        self.weight[expert, first:end, : rows.shape[1]] = rows
        if self.scales is not None and scales is not None:
            self.scales[expert, first:end] = scales[part]
        if self.bias is not None and bias is not None:
            self.bias[expert, first:end] = bias[part]

    def multiply(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """`x` [num_rows, in] → [num_rows, out]; expert e has the rows before row ends[e], and `experts` names them."""
        if self.scales is None:
            out = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        else:
            out = torch.cat(list(self._widened_parts(x, self.scales, ends.tolist())))
        return out if self.bias is None else out + self.bias[experts]

    def _widened_parts(self, x: Tensor, scales: Tensor, ends: list[int]) -> Iterable[Tensor]:
        """The products of some experts after another."""
        count, row = max(1, _PART // self.weight[0].numel()), 0
        for first in range(0, len(ends), count):
            part = ends[first : first + count]
            if part[-1] == row:
                continue
            widened = (self.weight[first : first + count] * scales[first : first + count].unsqueeze(-1)).to(x.dtype)
            offsets = torch.tensor(part, dtype=torch.int32, device=x.device) - row
            yield F.grouped_mm(x[row : part[-1]], widened.transpose(1, 2), offs=offsets)
            row = part[-1]


@dataclass(frozen=True)
class GroupedExperts:
    """All experts of a layer."""

    gate_up: GroupedLinear
    down: GroupedLinear
    hidden_size: int


def pack(experts: Iterable[ExpertWeights], num_experts: int) -> GroupedExperts:
    """See `Backend.pack_experts`."""
    packed: GroupedExperts | None = None
    for index, expert in enumerate(experts):
        size = expert.down.shape[1]
        if packed is None:
            packed = _empty(expert, num_experts)
        inner = packed.down.weight.shape[2]
        packed.gate_up.store(index, 0, expert.gate_up, expert.gate_up_bias, slice(size))
        packed.gate_up.store(index, inner, expert.gate_up, expert.gate_up_bias, slice(size, None))
        packed.down.store(index, 0, expert.down, expert.down_bias, slice(None))
    if packed is None:
        raise ValueError("a layer without experts cannot be packed")
    return packed


def run(
    x: Tensor, packed: GroupedExperts, ids: Tensor, weights: Tensor, activate_and_mul: Callable[[Tensor], Tensor]
) -> Tensor:
    """See `Backend.experts`."""
    num_tokens, top_k = ids.shape
    experts, order = ids.flatten().sort(stable=True)
    ends = torch.bincount(experts, minlength=len(packed.down.weight)).cumsum(0).to(torch.int32)
    padded = F.pad(x, (0, packed.gate_up.weight.shape[2] - x.shape[1]))
    inner = activate_and_mul(packed.gate_up.multiply(padded[order // top_k], ends, experts))
    out = torch.empty(len(order), packed.hidden_size, dtype=torch.float32, device=x.device)
    out[order] = packed.down.multiply(inner, ends, experts)[:, : packed.hidden_size].float()
    total, *others = (out.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).unbind(1)
    for part in others:  # one after the other, so that the sum does not depend on the number of tokens
        total = total + part
    return total.to(x.dtype)


def _empty(expert: ExpertWeights, num_experts: int) -> GroupedExperts:
    hidden_size, size = expert.down.shape
    weight = expert.down
    # Widened weights of one byte have at least two bytes a number.
    unit = _ALIGNMENT // (2 if isinstance(weight, Int8Weight) else weight.itemsize)
    inner, outer = -(-size // unit) * unit, -(-hidden_size // unit) * unit
    return GroupedExperts(
        GroupedLinear.empty(expert.gate_up, expert.gate_up_bias, num_experts, 2 * inner, outer),
        GroupedLinear.empty(expert.down, expert.down_bias, num_experts, outer, inner),
        hidden_size,
    )
